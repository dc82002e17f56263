"""Words and rules: pure Python, no input or output."""
