"""Conversations of a policy with tools and games: turns, token by token, and what they are worth."""
