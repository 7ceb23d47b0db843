"""Runs sessions: opens, decodes, commits, detokenizes, resumes and ends them."""
