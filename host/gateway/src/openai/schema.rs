//! Schemas of the requests that are read field by field, for the OpenAPI document.
//!
//! The readers take each field by itself, so that an error names its field; the structs here list the same fields. A test
//! compares them with the readers' sources.

use super::{
    chat_message::MessageBody,
    parameters::Parameters,
    prompt::Prompt,
    reasoning::{ReasoningBody, TemplateBody, ThinkingBody},
    responses::Input,
    tools::ToolBody,
};
use serde_json::Value;
use std::{borrow::Cow, collections::BTreeMap};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        Ref, RefOr, Schema,
        schema::{AllOfBuilder, Type},
    },
};

/// The messages of a chat.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
struct ChatMessages {
    messages: Vec<MessageBody>,
}

/// Fields of a chat.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
struct ChatFields {
    tools: Option<Vec<ToolBody>>,
    /// `auto`, `none`, `required`, or an object that names a function.
    tool_choice: Option<Value>,
    /// The default is true, unless `tool_choice` forces a call.
    parallel_tool_calls: Option<bool>,
    logprobs: Option<bool>,
    /// Requires `logprobs`.
    #[schema(maximum = 20)]
    top_logprobs: Option<u32>,
    /// Takes precedence over `max_tokens`.
    #[schema(minimum = 1)]
    max_completion_tokens: Option<u32>,
    /// The only modality is `text`.
    modalities: Option<Vec<String>>,
    /// Whether the last message, which is the assistant's, is the beginning of the answer. The answer is what follows it.
    continue_final_message: Option<bool>,
    /// Must be false where `continue_final_message` is true, and is ignored elsewhere.
    add_generation_prompt: Option<bool>,
}

/// Fields that ask for reasoning. A more specific one takes precedence.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
struct ReasoningFields {
    /// `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`.
    reasoning_effort: Option<String>,
    reasoning: Option<ReasoningBody>,
    thinking: Option<ThinkingBody>,
    /// Whether the model reasons before it answers.
    enable_thinking: Option<bool>,
    chat_template_kwargs: Option<TemplateBody>,
}

/// Fields that specify the form of the answer; at most one of them may be given.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
struct OutputForm {
    response_format: Option<ResponseFormat>,
    /// A JSON Schema.
    guided_json: Option<Value>,
    /// A regular expression.
    guided_regex: Option<String>,
    /// A grammar in Lark's syntax.
    guided_grammar: Option<String>,
}

/// The form of an answer, with the field that its type needs.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
struct ResponseFormat {
    /// `text`, `json_object`, `json_schema`, `regex` or `grammar`.
    r#type: String,
    /// A JSON Schema, or OpenAI's envelope around it.
    json_schema: Option<Value>,
    /// A JSON Schema; another name for `json_schema`.
    schema: Option<Value>,
    regex: Option<String>,
    /// A grammar in Lark's syntax.
    grammar: Option<String>,
}

/// Fields of a text completion.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
struct CompletionFields {
    prompt: Prompt,
    /// Whether the answer begins with the prompt.
    echo: Option<bool>,
    #[schema(maximum = 20)]
    logprobs: Option<u32>,
}

/// Fields of a response.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
struct ResponseFields {
    input: Input,
    /// The system message. It is not continued by `previous_response_id`.
    instructions: Option<String>,
    #[schema(minimum = 1)]
    max_output_tokens: Option<u32>,
    /// It concerns tools that the host does not have.
    max_tool_calls: Option<u32>,
    /// At most 16 entries.
    metadata: Option<BTreeMap<String, String>>,
    /// Id of a stored response, which this one continues.
    previous_response_id: Option<String>,
    /// Whether the response is stored; the default is true.
    store: Option<bool>,
    /// Whether the response is produced in the background.
    background: Option<bool>,
    /// The form of the answer: `{"format": {"type": "json_schema", "name": …, "schema": …}}`.
    text: Option<Value>,
    /// Functions: `{"type": "function", "name": …, "description": …, "parameters": …}`.
    tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, or an object that names a function or the allowed ones.
    tool_choice: Option<Value>,
    /// The default is true, unless `tool_choice` forces a call.
    parallel_tool_calls: Option<bool>,
    /// `message.output_text.logprobs` adds log-probabilities.
    include: Option<Vec<String>>,
    #[schema(maximum = 20)]
    top_logprobs: Option<u32>,
    /// `disabled`, or `auto`, which leaves out the oldest items of an input that is too long.
    truncation: Option<String>,
    safety_identifier: Option<String>,
}

/// Fields of Workers AI: a request has `prompt` or `messages`; or `requests`, to queue a batch; or `request_id`, to fetch one.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it only describes a request")]
#[schema(rename_all = "camelCase")]
struct AiFields {
    prompt: Option<String>,
    messages: Option<Vec<MessageBody>>,
    /// Requests of a batch, each with the fields of a request and `external_reference`.
    requests: Option<Vec<Value>>,
    /// Id of the batch whose answers are requested.
    #[schema(rename = "request_id")]
    request_id: Option<String>,
    /// `rejectIfBusy` and `queueRequest` may be here, at the top of the body, or in the query.
    options: Option<Value>,
    reject_if_busy: Option<bool>,
    queue_request: Option<bool>,
}

/// Defines a request as the sum of structs, which are parts of other requests too.
macro_rules! request {
    ($(#[doc = $about:literal])* $name:ident = $($part:ty)|+) => {
        $(#[doc = $about])*
        pub(crate) struct $name;

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let request = AllOfBuilder::new()$(.item(Ref::from_schema_name(<$part>::name())))+;
                RefOr::T(Schema::AllOf(request.schema_type(Type::Object).description(Some(concat!($($about),*).trim())).build()))
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
                $(
                    schemas.push((<$part>::name().into_owned(), <$part>::schema()));
                    <$part>::schemas(schemas);
                )+
            }
        }
    };
}

request! {
    /// A request for a chat completion. Fields that would change the answer and cannot be served are refused; unknown ones are ignored, and `x-skep-ignored` names them.
    ChatCompletionRequest = ChatMessages | ChatFields | ReasoningFields | OutputForm | Parameters
}

request! {
    /// A request for a text completion. Fields that would change the answer and cannot be served are refused; unknown ones are ignored, and `x-skep-ignored` names them.
    CompletionRequest = CompletionFields | OutputForm | Parameters
}

request! {
    /// A request for a response. Unknown fields are ignored and named in `x-skep-ignored`, except those that would change the meaning of the answer.
    CreateResponseRequest = ResponseFields | ReasoningFields | Parameters
}

request! {
    /// A request of Workers AI. A field that exists only in OpenAI's schema selects an answer in OpenAI's schema.
    AiRunRequest = AiFields | ChatFields | ReasoningFields | OutputForm | Parameters
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Returns the names of the fields that the source of a reader takes.
    fn taken(source: &str) -> BTreeSet<String> {
        let source = source.split("#[cfg(test)]").next().unwrap();
        let calls = source.split(".take").skip(1);
        let names = calls.filter_map(|call| {
            let argument = call.split('(').nth(1)?.strip_prefix('"')?;
            argument.split('"').next().map(str::to_owned)
        });
        names.collect()
    }

    fn properties<T: PartialSchema>() -> BTreeSet<String> {
        let schema = serde_json::to_value(T::schema()).unwrap();
        schema["properties"].as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn the_schemas_have_the_fields_that_the_readers_take() {
        let chat = taken(include_str!("chat_request.rs"));
        assert_eq!(chat, &properties::<ChatMessages>() | &properties::<ChatFields>());
        assert_eq!(taken(include_str!("reasoning.rs")), properties::<ReasoningFields>());
        let mut taken_of_response = taken(include_str!("responses/request.rs"));
        assert!(taken_of_response.remove("reasoning"), "it is taken, shown and put back");
        assert_eq!(taken_of_response, properties::<ResponseFields>());
        assert_eq!(taken(include_str!("parameters.rs")), properties::<Parameters>());
        assert_eq!(taken(include_str!("response_format.rs")), properties::<OutputForm>());
        assert_eq!(taken(include_str!("completion_request.rs")), properties::<CompletionFields>());
        let of_workers_ai = &taken(include_str!("../routes/ai_batches.rs"))
            | &(&taken(include_str!("../routes/ai_run.rs"))
                | &taken(include_str!("../workers_ai/request.rs")));
        let described = properties::<AiFields>();
        let undescribed: Vec<_> = of_workers_ai.difference(&described).collect();
        // The first is never supported.
        assert_eq!(undescribed, ["raw"]);
    }
}
