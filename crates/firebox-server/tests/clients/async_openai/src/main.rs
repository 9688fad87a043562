//! Drives a server with `async-openai`. Usage: firebox-async-openai http://HOST:PORT/v1

use std::error::Error;

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{ChatCompletionMessageToolCalls, CreateChatCompletionRequest, FinishReason};
use async_openai::types::completions::CreateCompletionRequest;
use async_openai::types::embeddings::CreateEmbeddingRequest;
use async_openai::types::responses::{CreateResponse, OutputItem, ResponseStreamEvent};
use futures::StreamExt as _;
use serde_json::{Value, from_str, from_value, json};

type Outcome = Result<(), Box<dyn Error>>;

/// Builds a request of the package's type.
fn chat(more: Value) -> CreateChatCompletionRequest {
    let mut body = json!({
        "model": "pocket", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    from_value(body).unwrap()
}

fn lamp() -> Value {
    json!({
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}},
        "required": ["on", "room"],
        "additionalProperties": false,
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome {
    let url = std::env::args().nth(1).ok_or("where is the server?")?;
    let client = Client::with_config(OpenAIConfig::new().with_api_base(url).with_api_key("none"));
    models(&client).await?;
    chats(&client).await?;
    tools(&client).await?;
    forms(&client).await?;
    vectors(&client).await?;
    responses(&client).await?;
    leaving(&client).await?;
    errors(&client).await?;
    println!("done");
    Ok(())
}

async fn models(client: &Client<OpenAIConfig>) -> Outcome {
    let models = client.models().list().await?;
    let names: Vec<&str> = models.data.iter().map(|model| model.id.as_str()).collect();
    assert_eq!(names, ["llama", "pocket"]);
    assert_eq!(client.models().retrieve("pocket").await?.id, "pocket");
    Ok(())
}

async fn chats(client: &Client<OpenAIConfig>) -> Outcome {
    let whole = client.chat().create(chat(json!({"max_completion_tokens": 12}))).await?;
    let usage = whole.usage.as_ref().ok_or("no usage")?;
    assert_eq!(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
    let asked = chat(json!({
        "max_completion_tokens": 12, "stream": true, "stream_options": {"include_usage": true},
    }));
    let mut stream = client.chat().create_stream(asked).await?;
    let (mut text, mut last) = (String::new(), None);
    while let Some(part) = stream.next().await {
        let part = part?;
        for choice in &part.choices {
            text.push_str(choice.delta.content.as_deref().unwrap_or_default());
        }
        last = part.usage.or(last);
    }
    assert_eq!(Some(&text), whole.choices[0].message.content.as_ref());
    assert_eq!(last.ok_or("no usage")?.completion_tokens, usage.completion_tokens);
    Ok(())
}

async fn tools(client: &Client<OpenAIConfig>) -> Outcome {
    let tool = json!({"type": "function", "function": {"name": "lamp", "description": "A lamp", "parameters": lamp()}});
    let wish = json!({"tools": [tool], "tool_choice": "required"});
    let whole = client.chat().create(chat(wish.clone())).await?;
    let choice = &whole.choices[0];
    assert_eq!(choice.finish_reason, Some(FinishReason::ToolCalls));
    let calls = choice.message.tool_calls.as_ref().ok_or("no calls")?;
    let ChatCompletionMessageToolCalls::Function(call) = &calls[0] else { return Err("no function".into()) };
    let arguments: Value = from_str(&call.function.arguments)?;
    assert!(call.function.name == "lamp" && arguments["on"].is_boolean());

    let mut wish = wish;
    wish["stream"] = true.into();
    let mut stream = client.chat().create_stream(chat(wish)).await?;
    let (mut names, mut said, mut pieces) = (Vec::new(), String::new(), 0);
    while let Some(part) = stream.next().await {
        for piece in part?.choices.into_iter().flat_map(|choice| choice.delta.tool_calls).flatten() {
            let function = piece.function.ok_or("no function")?;
            names.extend(function.name);
            if let Some(arguments) = function.arguments.filter(|arguments| !arguments.is_empty()) {
                pieces += 1;
                said.push_str(&arguments);
            }
        }
    }
    assert_eq!((&names[..], &said), (&["lamp".to_owned()][..], &call.function.arguments));
    assert!(pieces > 1, "the arguments came at once");

    let answered = chat(json!({
        "messages": [
            {"role": "user", "content": "Light!"},
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": "It is on."},
        ],
        "tools": [tool], "max_completion_tokens": 8,
    }));
    assert!(client.chat().create(answered).await?.usage.ok_or("no usage")?.prompt_tokens > 0);
    Ok(())
}

async fn forms(client: &Client<OpenAIConfig>) -> Outcome {
    let form =
        json!({"type": "json_schema", "json_schema": {"name": "lamp", "schema": lamp(), "strict": true}});
    let formed = client.chat().create(chat(json!({"response_format": form}))).await?;
    let value: Value = from_str(formed.choices[0].message.content.as_deref().ok_or("no text")?)?;
    assert!(["hall", "attic"].contains(&value["room"].as_str().ok_or("no room")?));
    Ok(())
}

async fn vectors(client: &Client<OpenAIConfig>) -> Outcome {
    let wish = json!({"model": "llama", "input": ["Hello", "there"]});
    let plain = client.embeddings().create(from_value::<CreateEmbeddingRequest>(wish.clone())?).await?;
    let lengths: Vec<usize> = plain.data.iter().map(|entry| entry.embedding.len()).collect();
    assert_eq!(lengths, [32, 32]);
    let mut wish = wish;
    wish["encoding_format"] = "base64".into();
    let packed = client.embeddings().create_base64(from_value::<CreateEmbeddingRequest>(wish)?).await?;
    let unpacked: Vec<f32> = packed.data[1].embedding.clone().into();
    assert_eq!(unpacked, plain.data[1].embedding);
    Ok(())
}

async fn responses(client: &Client<OpenAIConfig>) -> Outcome {
    let wish = json!({"model": "pocket", "input": "Hello", "max_output_tokens": 12, "temperature": 0});
    let whole = client.responses().create(from_value::<CreateResponse>(wish)?).await?;
    assert!(whole.output_text().is_some_and(|text| !text.is_empty()));
    let wish = json!({
        "model": "pocket", "input": "Light!", "temperature": 0, "stream": true, "tool_choice": "required",
        "tools": [{"type": "function", "name": "lamp", "parameters": lamp(), "strict": true}],
    });
    let mut stream = client.responses().create_stream(from_value::<CreateResponse>(wish)?).await?;
    let (mut said, mut pieces, mut ended) = (String::new(), 0, None);
    while let Some(event) = stream.next().await {
        match event? {
            ResponseStreamEvent::ResponseFunctionCallArgumentsDelta(event) => {
                pieces += 1;
                said.push_str(&event.delta);
            }
            ResponseStreamEvent::ResponseCompleted(event) => ended = Some(event.response),
            _ => {}
        }
    }
    let ended = ended.ok_or("it did not end")?;
    let OutputItem::FunctionCall(call) = &ended.output[0] else { return Err("no call".into()) };
    assert_eq!((call.name.as_str(), &said), ("lamp", &call.arguments));
    assert!(pieces > 1, "the arguments came at once");
    Ok(())
}

/// Disconnects in the middle of an answer. The calling test checks that this cancels it.
async fn leaving(client: &Client<OpenAIConfig>) -> Outcome {
    let wish = json!({"model": "llama", "prompt": "Once", "max_tokens": 200, "n": 8, "stream": true});
    let mut stream = client.completions().create_stream(from_value::<CreateCompletionRequest>(wish)?).await?;
    stream.next().await.ok_or("nothing came")??;
    Ok(())
}

async fn errors(client: &Client<OpenAIConfig>) -> Outcome {
    for (wrong, field) in [(json!({"model": "none"}), "model"), (json!({"temperature": -1}), "temperature")] {
        let Err(OpenAIError::ApiError(error)) = client.chat().create(chat(wrong)).await else {
            return Err("nothing was wrong".into());
        };
        assert_eq!(error.api_error.param.as_deref(), Some(field), "{error:?}");
    }
    Ok(())
}
