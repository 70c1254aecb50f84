"""A run as one self-contained HTML file: curves, and the games of each question side by side."""

from prompt_r1.report.page import write_report

__all__ = ["write_report"]
