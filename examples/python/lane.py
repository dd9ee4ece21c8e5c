"""Lanekeeper over RabbitMQ with pika alone:

python lane.py ask|stream|publish "Name three rivers."
python lane.py cancel|result ID
"""

import json
import os
import sys
import time
import uuid

import pika

what, text = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(os.environ.get("AMQP_URL", "amqp://localhost:5672/")))
channel = connection.channel()
channel.confirm_delivery()  # basic_publish now raises if the broker does not confirm the message
request_id = str(uuid.uuid4())
properties = pika.BasicProperties(
    content_type="application/json",
    delivery_mode=pika.DeliveryMode.Persistent,
    priority=5,
    message_id=request_id,
    correlation_id=request_id,
    reply_to=None if what == "publish" else "amq.rabbitmq.reply-to",
)


def read(_channel, _method, properties, body):
    """Reads a reply, and stops at the last one."""
    headers, reply = properties.headers, json.loads(body)
    if headers.get("x-lane-part") == "event":  # one event of Anthropic's stream
        print(reply.get("delta", {}).get("text", ""), end="", flush=True)
        return
    if headers.get("x-lane-part") == "restart":  # an attempt failed: discard the parts so far
        print("\n[from the beginning]")
        return
    channel.stop_consuming()
    if "error" in (headers.get("x-lane-status"), headers.get("x-lane-control")):
        sys.exit(f"{reply['title']}: {reply['detail']}")
    if "x-lane-control" in headers:
        # accepted: recorded, told, ended or unseen; pending: running, waiting or unknown
        print(reply.get("outcome") or reply["status"], reply.get("due_at", ""))
    elif "x-lane-body" in headers:  # this example does not fetch it
        sys.exit(f"the answer is large: it lies at {headers['x-lane-body']}")
    else:  # the whole answer; a streamed one has been printed
        print("" if what == "stream" else "".join(block.get("text", "") for block in reply["content"]))


# on this channel, before the message is published
channel.basic_consume("amq.rabbitmq.reply-to", read, auto_ack=True)
if what in ("cancel", "result"):
    properties.type = what  # the same as the routing key
    channel.basic_publish("lane.control", what, json.dumps({what: text}), properties)
else:
    properties.headers = {"x-lane-sent-ms": int(time.time() * 1000), "x-lane-stream": what == "stream"}
    if "TRACEPARENT" in os.environ:  # the request's spans then belong to the caller's trace
        properties.headers["traceparent"] = os.environ["TRACEPARENT"]
    body = json.dumps({"max_tokens": 1024, "messages": [{"role": "user", "content": text}]})
    channel.basic_publish("lane.requests", "critical.examples.python", body, properties)  # lane.application.task
    print(request_id, file=sys.stdout if what == "publish" else sys.stderr)  # to cancel it, or to fetch its result
if what != "publish":
    connection.call_later(120, lambda: sys.exit("no answer within two minutes"))
    channel.start_consuming()
connection.close()
