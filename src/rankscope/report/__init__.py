"""Result files to pictures, one page and advice."""
