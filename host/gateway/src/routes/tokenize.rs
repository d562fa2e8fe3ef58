//! `/tokenize` and `/detokenize`: the tokens of texts and chats, and the text of tokens, in the shapes of vLLM.

use super::chat_completions::{model_of, named};
use crate::{
    ApiError, Gateway,
    body::{FieldsBody, FromFields, run_on_compute},
    caller::Caller,
    headers,
    openai::{
        chat_message::{MessageBody, read_all},
        fields::Fields,
        reasoning::{self, AskedReasoning},
        tools::{self, ToolBody},
    },
};
use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use skep_api::{Detokenize, Detokenized, Tokens};
use skep_engine::{
    Cancel, Engine, Model, SpecialTokens,
    chat::{Opening, Sender, encode_chat, encode_prompt, refuse_images, refuse_oversized},
};
use utoipa::ToSchema;

/// A text or a chat whose tokens are requested: `prompt` or `messages`.
#[derive(Debug, ToSchema)]
#[schema(as = Tokenize)]
pub(crate) struct TokenizeBody {
    /// Name of a model of this host; the default is the host's default model.
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<MessageBody>>,
    tools: Option<Vec<ToolBody>>,
    /// With `messages`: whether the tokens end with the beginning of the answer; by default they do.
    add_generation_prompt: Option<bool>,
    /// With `prompt`: whether the token is added that begins a text of the model; by default it is.
    add_special_tokens: Option<bool>,
    /// Whether the answer has the text of each token.
    return_token_strs: Option<bool>,
    #[schema(ignore)]
    reasoning: AskedReasoning,
    #[schema(ignore)]
    ignored: Vec<String>,
}

impl FromFields for TokenizeBody {
    fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let body = TokenizeBody {
            model: fields.take("model")?,
            prompt: fields.take("prompt")?,
            messages: fields.take("messages")?,
            tools: fields.take("tools")?,
            add_generation_prompt: fields.take("add_generation_prompt")?,
            add_special_tokens: fields.take("add_special_tokens")?,
            return_token_strs: fields.take("return_token_strs")?,
            reasoning: reasoning::take(&mut fields)?,
            ignored: Vec::new(),
        };
        match (&body.prompt, &body.messages) {
            (Some(_), Some(_)) => {
                return Err(ApiError::parameter("prompt", "send either `prompt` or `messages`, not both"));
            }
            (None, None) => return Err(ApiError::parameter("prompt", "`prompt` or `messages` is missing")),
            _ => {}
        }
        let unused = if body.prompt.is_some() {
            [("tools", body.tools.is_some()), ("add_generation_prompt", body.add_generation_prompt.is_some())]
        } else {
            [("add_special_tokens", body.add_special_tokens.is_some()), ("", false)]
        };
        let unused = unused.into_iter().filter(|(_, given)| *given).map(|(name, _)| name.to_owned());
        let ignored = fields.into_ignored().into_iter().chain(unused).collect();
        Ok(TokenizeBody { ignored, ..body })
    }
}

impl TokenizeBody {
    fn bytes(&self) -> usize {
        let messages = self.messages.iter().flatten().map(MessageBody::text_bytes).sum::<usize>();
        self.prompt.as_ref().map_or(0, String::len) + messages
    }

    fn tokens(&self, engine: &Engine, cancel: &Cancel) -> Result<Vec<u32>, ApiError> {
        match (&self.prompt, &self.messages) {
            (Some(prompt), _) if self.add_special_tokens == Some(false) => {
                refuse_oversized(engine, prompt, cancel)?;
                let tokens = engine.tokenizer().encode(prompt, SpecialTokens::Parse);
                Ok(tokens.map_err(skep_engine::EngineError::from)?)
            }
            (Some(prompt), _) => Ok(encode_prompt(engine, prompt, cancel)?),
            (None, messages) => {
                let messages = read_all(messages.as_deref().unwrap_or_default(), 1)?;
                refuse_images(&messages, &engine.info().name)?;
                let tools = tools::read(self.tools.as_deref().unwrap_or_default())?;
                let opening =
                    Opening { tools: &tools, examples: &[], reasoning: Some(&self.reasoning.wanted) };
                let opens = self.add_generation_prompt.unwrap_or(true);
                Ok(encode_chat(engine, &messages, opening, opens, Sender { tenant: None, cancel })?)
            }
        }
    }
}

/// Returns the tokens of a text, or those that a chat becomes.
#[utoipa::path(post, path = "/tokenize", tag = "models", operation_id = "tokenize",
    request_body = TokenizeBody,
    responses(
        (status = 200, description = "The tokens. `x-skep-ignored` names the fields that changed nothing.", body = Tokens),
        (status = 404, description = "`model_not_found`"),
    ))]
pub(crate) async fn tokenize(
    State(gateway): State<Gateway>,
    caller: Caller,
    FieldsBody(body): FieldsBody<TokenizeBody>,
) -> Result<Response, ApiError> {
    let engine = engine_of(&gateway, &caller, body.model.as_deref()).await?;
    let bytes = body.bytes();
    let count = move |cancel: &Cancel| {
        let tokens = body.tokens(&engine, cancel)?;
        let text = |id: &u32| {
            String::from_utf8_lossy(engine.tokenizer().token_bytes(*id).unwrap_or_default()).into_owned()
        };
        let answer = Tokens {
            count: tokens.len() as u64,
            max_model_len: engine.sequence_limit() as u64,
            token_strs: (body.return_token_strs == Some(true)).then(|| tokens.iter().map(text).collect()),
            tokens,
        };
        Ok((answer, body.ignored))
    };
    let (answer, ignored) = run_on_compute(&gateway, caller.tenant.as_str(), bytes, count).await?;
    Ok(headers::ignored(Json(answer).into_response(), &ignored))
}

/// Returns the text of tokens.
#[utoipa::path(post, path = "/detokenize", tag = "models", operation_id = "detokenize",
    request_body = Detokenize,
    responses(
        (status = 200, description = "The text. `x-skep-ignored` names the fields that changed nothing.", body = Detokenized),
        (status = 404, description = "`model_not_found`"),
    ))]
pub(crate) async fn detokenize(
    State(gateway): State<Gateway>,
    caller: Caller,
    FieldsBody((body, ignored)): FieldsBody<(Detokenize, Vec<String>)>,
) -> Result<Response, ApiError> {
    let engine = engine_of(&gateway, &caller, body.model.as_deref()).await?;
    let bytes = size_of_val(&body.tokens[..]);
    let decode = move |_: &Cancel| {
        let unknown = |id: &u32| engine.tokenizer().token_bytes(*id).is_none();
        if let Some(index) = body.tokens.iter().position(unknown) {
            let message =
                format!("token {} is not in the vocabulary of {}", body.tokens[index], engine.info().name);
            return Err(ApiError::parameter(format!("tokens[{index}]"), message));
        }
        Ok(Detokenized { prompt: engine.tokenizer().decode(&body.tokens, false) })
    };
    let answer = run_on_compute(&gateway, caller.tenant.as_str(), bytes, decode).await?;
    Ok(headers::ignored(Json(answer).into_response(), &ignored))
}

impl FromFields for (Detokenize, Vec<String>) {
    fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let body = Detokenize { model: fields.take("model")?, tokens: fields.take_required("tokens")? };
        Ok((body, fields.into_ignored()))
    }
}

/// Returns the engine of a model, if it is computed by this host.
async fn engine_of(gateway: &Gateway, caller: &Caller, model: Option<&str>) -> Result<Engine, ApiError> {
    match model_of(gateway, caller, named(model)).await? {
        Model::Local(engine) => Ok(engine),
        Model::Remote(remote) => {
            let message = format!(
                "{} may be an upstream model, whose tokenizer this host does not have; name a local model",
                remote.info().name
            );
            Err(ApiError::parameter("model", message))
        }
    }
}
