//! Runs one generation in the session's conversation, with options from the message's data. The reply's data
//! describes the result.
//!
//! Data: `{conversation, model, system, max_tokens, temperature, seed, stop: [..], schema, regex, grammar,
//! hidden, complete, clear}`, each optional. `complete` continues the text without a conversation. The text
//! `messages` replies with the conversation so far, `models` with the models, and `usage` with the
//! conversation's usage.

use serde::Deserialize;
use skep_sdk::serde_json::{Value, json};
use skep_sdk::{AgentError, Context, Finish, Generation, Message, Output, Reply, Usage, agent};

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    conversation: Option<String>,
    model: Option<String>,
    system: Option<String>,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    seed: Option<u64>,
    stop: Vec<String>,
    schema: Option<Value>,
    regex: Option<String>,
    grammar: Option<String>,
    hidden: bool,
    complete: bool,
    clear: bool,
}

/// Sets the options that both kinds of builder accept.
macro_rules! with_options {
    ($builder:expr, $options:expr) => {{
        let (mut builder, options) = ($builder, $options);
        if let Some(tokens) = options.max_tokens {
            builder = builder.max_tokens(tokens);
        }
        if let Some(temperature) = options.temperature {
            builder = builder.temperature(temperature);
        }
        if let Some(seed) = options.seed {
            builder = builder.seed(seed);
        }
        for stop in &options.stop {
            builder = builder.with_stop(stop.as_str());
        }
        match (&options.schema, &options.regex, &options.grammar) {
            (Some(schema), _, _) => builder = builder.output(Output::JsonSchema(schema.clone())),
            (_, Some(regex), _) => builder = builder.output(Output::Regex(regex.clone())),
            (_, _, Some(grammar)) => builder = builder.output(Output::Grammar(grammar.clone())),
            _ => {}
        }
        if options.hidden { builder.hidden() } else { builder }
    }};
}

/// Generates once, with the given options.
#[agent]
async fn generate(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let options: Options = if message.data.is_some() { message.json()? } else { Options::default() };
    let name = options.conversation.as_deref().unwrap_or("main");
    let conversation = match &options.model {
        Some(model) if !options.complete => cx.conversation_with_model(name, model),
        _ => cx.conversation_named(name),
    };
    match message.text.as_str() {
        "messages" => return Ok(Reply::text(format!("{:?}", conversation.messages()?))),
        "models" => return Ok(Reply::text(format!("{:?}", cx.models()))),
        "usage" => return Reply::json("usage", &usage(conversation.usage()?)),
        _ => {}
    }
    let generation = if options.complete {
        let mut completion = cx.complete(message.text);
        if let Some(model) = &options.model {
            completion = completion.model(model.as_str());
        }
        with_options!(completion, &options).generate().await?
    } else {
        let mut conversation = if options.clear { conversation.clear() } else { conversation };
        if let Some(system) = &options.system {
            conversation = conversation.system(system);
        }
        with_options!(conversation.user(message.text), &options).generate().await?
    };
    Reply::json(generation.text.clone(), &summary(&generation))
}

fn summary(generation: &Generation) -> Value {
    let finish = match generation.finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::ToolCalls => "tool_calls",
    };
    let timing = generation.timing;
    json!({
        "finish": finish,
        "reasoning": generation.reasoning,
        "usage": usage(generation.usage),
        "timing": {"queue_us": timing.queue_us, "first_token_us": timing.first_token_us, "total_us": timing.total_us},
    })
}

fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    })
}
