"""A response in the background, with OpenAI's SDK: it is answered although nobody waits, whatever process dies.

pip install openai
export OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=any
python background.py "Name three rivers."        # prints its id, then its text as it comes
python background.py --id resp_…                 # the text again, from its beginning
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("prompt", nargs="?", default="Name three rivers.")
parser.add_argument("--id")
given = parser.parse_args()

client = OpenAI()
if given.id:
    events = client.responses.retrieve(given.id, stream=True)
else:
    events = client.responses.create(
        model="gpt-5.5",
        input=given.prompt,
        background=True,
        stream=True,
        extra_headers={"x-lane-name": "normal"},
    )
for event in events:
    match event.type:
        case "response.created":
            print(event.response.id, flush=True)
        case "response.output_text.delta":
            print(event.delta, end="", flush=True)
        case "response.completed":
            print()
