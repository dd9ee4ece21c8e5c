// Ask over RabbitMQ: go run . "Name three rivers."
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

func main() {
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
	queue, err := channel.QueueDeclare("", false, true, true, false, nil)
	check(err)
	replies, err := channel.Consume(queue.Name, "", true, true, false, false, nil)
	check(err)

	body, err := json.Marshal(map[string]any{
		"max_tokens": 200,
		"messages":   []map[string]string{{"role": "user", "content": os.Args[1]}},
	})
	check(err)
	id := fmt.Sprintf("go-%d", time.Now().UnixNano())
	confirm, err := channel.PublishWithDeferredConfirm("lane.requests", "critical.examples.go", false, false,
		amqp.Publishing{
			ContentType: "application/json", DeliveryMode: amqp.Persistent, Priority: 5,
			MessageId: id, CorrelationId: id, ReplyTo: queue.Name, Body: body,
			Headers: amqp.Table{"x-lane-sent-ms": time.Now().UnixMilli()},
		})
	check(err)
	waiting, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if taken, err := confirm.WaitContext(waiting); err != nil || !taken {
		log.Fatal("the broker did not take the request: its lane is full; try again later")
	}

	select {
	case reply := <-replies:
		var answer struct {
			Title, Detail string
			Content       []struct{ Text string }
		}
		check(json.Unmarshal(reply.Body, &answer))
		if reply.Headers["x-lane-status"] == "error" {
			log.Fatalf("%s: %s", answer.Title, answer.Detail)
		}
		for _, block := range answer.Content {
			fmt.Print(block.Text)
		}
		fmt.Println()
	case <-waiting.Done():
		log.Fatal("no answer within two minutes")
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
