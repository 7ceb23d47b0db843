"""Starts, keeps and updates the replicas of a deployment on Ray."""
