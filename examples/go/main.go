// Lanekeeper over RabbitMQ with amqp091-go alone:
//
//	go run . ask|stream|publish "Name three rivers."
//	go run . cancel|result ID
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Direct reply-to: replies come to the channel that published. It needs no right to declare a queue.
const directReplyTo = "amq.rabbitmq.reply-to"

type answer struct {
	Title, Detail   string                  // in a problem document
	Content         []struct{ Text string } // in an answer
	Delta           struct{ Text string }   // in an event of a stream
	Outcome, Status any                     // in an answer to a control message
	DueAt           string                  `json:"due_at"`
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: ask|stream|publish PROMPT, or cancel|result ID")
	}
	what, text := os.Args[1], os.Args[2]
	url := os.Getenv("AMQP_URL")
	if url == "" {
		url = "amqp://localhost:5672/"
	}
	connection, err := amqp.Dial(url)
	check(err)
	defer connection.Close()
	channel, err := connection.Channel()
	check(err)
	check(channel.Confirm(false))
	// must be on the channel that publishes, and before the publish
	replies, err := channel.Consume(directReplyTo, "", true, false, false, false, nil)
	check(err)

	id := fmt.Sprintf("go-%d", time.Now().UnixNano())
	message := amqp.Publishing{
		ContentType: "application/json", DeliveryMode: amqp.Persistent, Priority: 5,
		MessageId: id, CorrelationId: id, ReplyTo: directReplyTo,
	}
	exchange, key := "lane.requests", "critical.examples.go"
	var body any
	switch what {
	case "ask", "stream", "publish":
		body = map[string]any{"max_tokens": 1024, "messages": []map[string]string{{"role": "user", "content": text}}}
		message.Headers = amqp.Table{"x-lane-sent-ms": time.Now().UnixMilli(), "x-lane-stream": what == "stream"}
		if parent := os.Getenv("TRACEPARENT"); parent != "" { // the request's spans then belong to the caller's trace
			message.Headers["traceparent"] = parent
		}
		if what == "publish" {
			message.ReplyTo = ""
		}
	case "cancel", "result":
		exchange, key, message.Type = "lane.control", what, what // key and type are the same
		body = map[string]string{what: text}
	default:
		log.Fatalf("%s: ask, stream, publish, cancel or result", what)
	}
	message.Body, err = json.Marshal(body)
	check(err)
	waiting, stop := context.WithTimeout(context.Background(), 2*time.Minute)
	defer stop()
	confirm, err := channel.PublishWithDeferredConfirm(exchange, key, false, false, message)
	check(err)
	if taken, err := confirm.WaitContext(waiting); err != nil || !taken {
		log.Fatal("the broker did not confirm the message: the lane may be full; try again later")
	}
	if what == "publish" {
		fmt.Println(id) // to cancel it, or to fetch its result
		return
	}
	for {
		select {
		case reply := <-replies:
			if isLast(reply) {
				return
			}
		case <-waiting.Done():
			log.Fatal("no answer within two minutes")
		}
	}
}

// isLast prints a reply, and returns whether it is the last one.
func isLast(reply amqp.Delivery) bool {
	var found answer
	check(json.Unmarshal(reply.Body, &found))
	control, status := reply.Headers["x-lane-control"], reply.Headers["x-lane-status"]
	switch {
	case control == "error" || status == "error":
		log.Fatalf("%s: %s", found.Title, found.Detail)
	case control == "accepted": // recorded, told, ended or unseen
		fmt.Println(found.Outcome)
	case control == "pending": // running, waiting or unknown
		fmt.Println(found.Status, found.DueAt)
	case reply.Headers["x-lane-part"] == "restart": // an attempt failed: discard the parts so far
		fmt.Println("\n[from the beginning]")
		return false
	case reply.Headers["x-lane-part"] == "event":
		fmt.Print(found.Delta.Text)
		return false
	case reply.Headers["x-lane-body"] != nil: // this example does not fetch it
		log.Fatalf("the answer is large: it lies at %s", reply.Headers["x-lane-body"])
	default: // the whole answer; if it was streamed, it has been printed already
		if os.Args[1] != "stream" {
			for _, block := range found.Content {
				fmt.Print(block.Text)
			}
		}
		fmt.Println()
	}
	return true
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
