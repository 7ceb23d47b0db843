"""Verifies proposals with the target model."""
