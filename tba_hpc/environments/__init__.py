"""Conversations of a policy with tools and games: their turns, token by token, and their rewards."""
