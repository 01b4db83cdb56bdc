import json
import sys

from openai import OpenAI

row, client = json.loads(sys.stdin.readline()), OpenAI()  # finds address and key in its environment
messages = [{"role": "user", "content": row["prompt"]}]
for _ in range(3):
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    right = said.rstrip(".").split()[-1:] == [row.get("answer")]  # a plain question of tba ask has none
    if right:
        break
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "No. Try again."}]
print(float(right))  # the reward
