"""The interface of drafters, and drafters that need no replica."""
