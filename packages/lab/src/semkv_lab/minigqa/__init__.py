"""MiniGQA: drawn scenes and questions about them, in the layout and schema of GQA."""
