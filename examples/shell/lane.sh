#!/usr/bin/env bash
# Lanekeeper over RabbitMQ with Debian's amqp-tools and jq: ./lane.sh ask|stream|publish "Name three rivers."
# These tools can set neither a message id nor a type: to choose a request's id, to cancel or fetch it, use
# `lanekeeper send`, `cancel` and `result`. If your user may not declare queues, use the one that was declared for its
# replies: REPLY_QUEUE=lane.reply.NAME ./lane.sh …
set -euo pipefail
what=$1 text=$2
url=${AMQP_URL:-amqp://localhost:5672}
url=${url%/} # for amqp-tools a slash at the end means a virtual host without a name
queue=${REPLY_QUEUE:-examples.shell.$$}
publish=(amqp-publish --url="$url" --exchange=lane.requests --routing-key=critical.examples.shell --persistent
  --content-type=application/json --header="x-lane-sent-ms: $(date +%s%3N)")
# the request's spans then belong to the caller's trace
if [[ -n ${TRACEPARENT:-} ]]; then publish+=(--header="traceparent: $TRACEPARENT"); fi
case $what in
  publish) ;;
  ask) publish+=(--reply-to="$queue") ;;
  stream) publish+=(--reply-to="$queue" --header="x-lane-stream: true") ;;
  *) echo "$what: ask, stream or publish" >&2 && exit 2 ;;
esac
if [[ -z ${REPLY_QUEUE:-} && $what != publish ]]; then
  amqp-declare-queue --url="$url" --queue="$queue" >/dev/null
  trap 'amqp-delete-queue --url="$url" --queue="$queue" >/dev/null' EXIT
fi
jq --null-input --compact-output --arg text "$text" '{prompt: $text}' | tr -d '\n' | "${publish[@]}"
[[ $what != publish ]] || exit 0
# The tools show no headers, so a reply is known by its body: an event of the stream, a restart ({}), the whole answer,
# the address of a large one, or a problem document.
while reply=$(amqp-consume --url="$url" --queue="$queue" --count=1 --prefetch-count=1 cat); do
  case $(jq --raw-output '.type // "restart"' <<<"$reply") in
    message)
      if [[ $what == ask ]]; then jq --join-output '.content[].text // ""' <<<"$reply"; fi
      echo
      break
      ;;
    urn:lanekeeper:body) jq --raw-output '"the answer is large: it lies at \(.address)"' <<<"$reply" >&2 && exit 1 ;;
    urn:*) jq --raw-output '"\(.title): \(.detail)"' <<<"$reply" >&2 && exit 1 ;;
    restart) printf '\n[from the beginning]\n' ;;
    *) jq --join-output '.delta.text // ""' <<<"$reply" ;;
  esac
done
