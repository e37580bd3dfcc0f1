"""The Linformer model family."""
