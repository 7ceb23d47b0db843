"""Scores proposals with the target model: the replica that has the last word."""
