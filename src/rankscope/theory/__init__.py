"""What is proved about attention's rank, made to run: Linformer's theorems, clustering dynamics, rank collapse."""
