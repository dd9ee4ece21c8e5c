"""Read an answer as it comes, with pika alone: python stream.py "Tell me a story." """

import json
import os
import sys
import time
import uuid

import pika

connection = pika.BlockingConnection(pika.URLParameters(os.environ.get("AMQP_URL", "amqp://localhost:5672/")))
channel = connection.channel()
channel.confirm_delivery()


def read(channel, _method, properties, body):
    reply = json.loads(body)
    status, part = properties.headers.get("x-lane-status"), properties.headers.get("x-lane-part")
    if status == "error":
        sys.exit(f"{reply['title']}: {reply['detail']}")
    if status == "ok":  # the whole answer, put together
        print()
        channel.stop_consuming()
    elif part == "restart":  # an attempt failed: discard the parts so far
        print("\n[from the beginning]")
    else:  # one event of Anthropic's stream
        print(reply.get("delta", {}).get("text", ""), end="", flush=True)


channel.basic_consume("amq.rabbitmq.reply-to", read, auto_ack=True)  # on this channel, before the request is published
request_id = str(uuid.uuid4())
channel.basic_publish(
    exchange="lane.requests",
    routing_key="normal.examples.python",
    body=json.dumps({"max_tokens": 200, "messages": [{"role": "user", "content": sys.argv[1]}]}),
    properties=pika.BasicProperties(
        content_type="application/json",
        delivery_mode=pika.DeliveryMode.Persistent,
        priority=5,
        message_id=request_id,
        correlation_id=request_id,
        reply_to="amq.rabbitmq.reply-to",
        headers={"x-lane-stream": True, "x-lane-sent-ms": int(time.time() * 1000)},
    ),
)
channel.start_consuming()
connection.close()
