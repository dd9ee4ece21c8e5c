"""Lanekeeper in a Flask application, which has no event loop.

pip install ./lanekeeper flask; flask --app flask_view run
"""

import os
from collections.abc import Iterator

from flask import Flask, Response, request

from lanekeeper import NoReply, Part, Problem
from lanekeeper.sync import Client

app = Flask(__name__)
# connects on first use, in each process that the server forks; all threads share it
lanes = Client(os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/"))


@app.post("/ask")
def ask() -> tuple[dict[str, str], int]:
    try:
        answer = lanes.request({"prompt": request.json["prompt"]}, key="critical.web.ask", deadline_s=30)
    except Problem as problem:
        return {"error": problem.code, "detail": problem.detail}, problem.status
    except NoReply as error:
        return {"error": "no_reply", "detail": str(error)}, 504
    return {"answer": answer.text}, 200


@app.post("/story")
def story() -> Response:
    parts = lanes.stream({"prompt": request.json["prompt"]}, key="critical.web.story", deadline_s=60)

    def texts() -> Iterator[str]:
        for part in parts:
            if isinstance(part, Part):
                yield part.text

    return Response(texts(), mimetype="text/plain")
