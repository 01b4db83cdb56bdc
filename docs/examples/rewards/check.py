"""Reward of one completion: a line of JSON comes in, the last line of what goes out is the number."""

import json
import sys

row = json.load(sys.stdin)
answer = row["completion"].partition("####")[2].strip()
print(1.0 if answer == row["answer"] else 0.1 if answer.lstrip("-").isdigit() else 0.0)
