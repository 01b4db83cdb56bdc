"""Conversations of a policy with tools and games: their turns, as exact tokens, and their rewards."""
