"""Ask, stream, publish, cancel and fetch with our own client:

    python client.py ask|stream|publish PROMPT
    python client.py cancel|result ID

AMQP_URL is the broker's address, or a gateway's: http(s)://…, with its key in GATEWAY_KEY. BODIES is the URL of the
workers' store of large bodies and answers, if they have one."""

import asyncio
import os
import sys

from lanekeeper import Client, ControlRefused, Final, NotEnded, Part, Problem

KEY = "critical.examples.client"
HEADERS = {"traceparent": os.environ["TRACEPARENT"]} if "TRACEPARENT" in os.environ else {}


async def main(what: str, text: str) -> None:
    url = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
    async with Client(url, api_key=os.environ.get("GATEWAY_KEY"), bodies=os.environ.get("BODIES")) as client:
        match what:
            case "ask":
                print((await client.request({"prompt": text}, key=KEY, deadline_s=60, headers=HEADERS)).text)
            case "stream":
                async for reply in client.stream({"prompt": text}, key=KEY, headers=HEADERS):
                    match reply:
                        case Part(kind="restart"):
                            print("\n[from the beginning]")
                        case Part():
                            print(reply.text, end="", flush=True)
                        case Final():
                            print()
            case "publish":
                print(await client.publish({"prompt": text}, key=KEY, headers=HEADERS))
            case "cancel":
                print(await client.cancel(text))
            case "result":
                print((await client.result(text)).text)


try:
    asyncio.run(main(*sys.argv[1:]))
except (Problem, NotEnded, ControlRefused) as error:
    sys.exit(str(error))
