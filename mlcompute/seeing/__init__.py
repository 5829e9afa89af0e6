"""Inspection: tables, pictures, profiles and reports of a graph."""
