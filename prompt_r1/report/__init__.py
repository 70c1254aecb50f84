"""A run as one self-contained HTML file: curves, and the games of each question side by side."""
