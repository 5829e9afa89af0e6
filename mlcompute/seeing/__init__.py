"""Seeing what a graph is and does: tables, pictures, profiles and reports."""
