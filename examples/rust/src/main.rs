//! Lanekeeper over RabbitMQ with lapin alone:
//!
//! ```sh
//! cargo run -- ask|stream|publish "Name three rivers."
//! cargo run -- cancel|result ID
//! ```

use std::error::Error;
use std::io::{Write, stdout};
use std::process::exit;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::{Value, json};

/// Direct reply-to: replies come to the channel that published. It needs no right to declare a queue.
const DIRECT_REPLY_TO: &str = "amq.rabbitmq.reply-to";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let [what, text] = std::env::args()
        .skip(1)
        .collect::<Vec<_>>()
        .try_into()
        .unwrap_or_else(|_| {
            eprintln!("usage: ask|stream|publish PROMPT, or cancel|result ID");
            exit(2)
        });
    // for this client a slash at the end of the URL means a virtual host without a name
    let url = std::env::var("AMQP_URL").unwrap_or("amqp://localhost:5672".into());
    let connection =
        Connection::connect(url.trim_end_matches('/'), ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    // must be on the channel that publishes, and before the publish
    let unacknowledged = BasicConsumeOptions {
        no_ack: true,
        ..Default::default()
    };
    let mut replies = channel
        .basic_consume(
            DIRECT_REPLY_TO.into(),
            "".into(),
            unacknowledged,
            FieldTable::default(),
        )
        .await?;

    let id = uuid::Uuid::new_v4().to_string();
    let mut properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_delivery_mode(2)
        .with_priority(5)
        .with_message_id(id.as_str().into())
        .with_correlation_id(id.as_str().into());
    if what != "publish" {
        properties = properties.with_reply_to(DIRECT_REPLY_TO.into());
    }
    let (exchange, key, body) = if what == "cancel" || what == "result" {
        properties = properties.with_type(what.as_str().into()); // the same as the routing key
        ("lane.control", what.as_str(), json!({ &what: text }))
    } else {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let mut headers = FieldTable::default();
        headers.insert(
            "x-lane-sent-ms".into(),
            AMQPValue::LongLongInt(now.as_millis().try_into()?),
        );
        headers.insert("x-lane-stream".into(), AMQPValue::Boolean(what == "stream"));
        if let Ok(parent) = std::env::var("TRACEPARENT") {
            // the request's spans then belong to the caller's trace
            headers.insert("traceparent".into(), AMQPValue::LongString(parent.into()));
        }
        properties = properties.with_headers(headers);
        let body = json!({"max_tokens": 1024, "messages": [{"role": "user", "content": text}]});
        ("lane.requests", "critical.examples.rust", body)
    };
    let published = channel
        .basic_publish(
            exchange.into(),
            key.into(),
            BasicPublishOptions::default(),
            body.to_string().as_bytes(),
            properties,
        )
        .await?;
    if !published.await?.is_ack() {
        return Err(
            "the broker did not confirm the message: the lane may be full; try again later".into(),
        );
    }
    if what == "publish" {
        println!("{id}"); // to cancel it, or to fetch its result
        return Ok(());
    }
    loop {
        let reply = tokio::time::timeout(Duration::from_secs(120), replies.next()).await?;
        let reply = reply.ok_or("the connection was lost before the answer came")??;
        if is_last(&reply, what == "stream")? {
            return Ok(());
        }
    }
}

/// Prints a reply, and returns whether it is the last one.
fn is_last(reply: &Delivery, streamed: bool) -> Result<bool, Box<dyn Error>> {
    let found: Value = serde_json::from_slice(&reply.data)?;
    let (control, status) = (
        header(reply, "x-lane-control"),
        header(reply, "x-lane-status"),
    );
    match header(reply, "x-lane-part").as_str() {
        "event" => {
            print!("{}", found["delta"]["text"].as_str().unwrap_or(""));
            stdout().flush()?;
            return Ok(false);
        }
        "restart" => {
            println!("\n[from the beginning]"); // an attempt failed: discard the parts so far
            return Ok(false);
        }
        _ => (),
    }
    let text = |field: &str| found[field].as_str().unwrap_or("").to_owned();
    if control == "error" || status == "error" {
        eprintln!("{}: {}", text("title"), text("detail"));
        exit(1);
    } else if control == "accepted" {
        println!("{}", text("outcome")); // recorded, told, ended or unseen
    } else if control == "pending" {
        println!("{} {}", text("status"), text("due_at")); // running, waiting or unknown
    } else if !header(reply, "x-lane-body").is_empty() {
        eprintln!(
            "the answer is large: it lies at {}",
            header(reply, "x-lane-body")
        ); // not fetched here
        exit(1);
    } else if streamed {
        println!(); // the whole answer, which has been printed
    } else {
        let blocks = found["content"].as_array().ok_or("this is no message")?;
        println!(
            "{}",
            blocks
                .iter()
                .filter_map(|block| block["text"].as_str())
                .collect::<String>()
        );
    }
    Ok(true)
}

fn header(reply: &Delivery, name: &str) -> String {
    let headers = reply.properties.headers().as_ref();
    match headers.and_then(|found| found.inner().get(name)) {
        Some(AMQPValue::LongString(text)) => text.to_string(),
        _ => String::new(),
    }
}
