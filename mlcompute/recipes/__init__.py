"""Recipes: networks that `mlcompute train NAME` trains and `mlcompute new NAME` writes out, each file a script."""
