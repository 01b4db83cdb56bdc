"""A program that is an agent: it asks the model for a sum, calculates when asked to, and prints the reward.

It imports only Python's standard library, so that it starts as fast as a program can.
"""

import json
import os
import sys
import urllib.request
from typing import Any

TURNS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def said(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's next message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def calculate(arguments: str) -> str:
    """Return the sum of two numbers, or what is wrong with the call."""
    try:
        a, b = json.loads(arguments)["expression"].split("+")
        return str(int(a) + int(b))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "error: give expression as a+b"


def main() -> None:
    """Run one episode."""
    row = json.loads(sys.stdin.readline())
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(TURNS):
        message = said(messages)
        calls = message.get("tool_calls") or []
        if not calls:
            break
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": calculate(call["function"]["arguments"])}
            for call in calls
        ]
    answer = row.get("answer")  # a plain question of tba ask has none
    print(float((message.get("content") or "").strip() == answer))


if __name__ == "__main__":
    main()
