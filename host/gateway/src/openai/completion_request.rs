//! Reads the body of `/v1/completions`.

use super::{
    fields::{Fields, asks_for_nothing},
    parameters::Parameters,
    prompt::Prompt,
    response_format::{self, Form},
};
use crate::ApiError;
use skep_engine::{GenerateRequest, Model, Sampling, chat::ChatOptions};
use skep_runtime::BatchPrompt;

const MAX_PROMPTS: usize = 64;
const MAX_LOGPROBS: u32 = 20;
const DEFAULT_MAX_TOKENS: u32 = 16;

#[derive(Debug)]
pub(crate) struct CompletionBody {
    pub prompt: Prompt,
    pub echo: bool,
    pub logprobs: Option<u32>,
    pub output: Option<Form>,
    pub parameters: Parameters,
    /// Names of the fields that change nothing here.
    pub ignored: Vec<String>,
}

impl CompletionBody {
    pub(crate) fn read(mut fields: Fields) -> Result<Self, ApiError> {
        fields.settle("suffix", asks_for_nothing);
        fields.refuse(&[
            ("suffix", "put the whole text into the prompt"),
            ("messages", "use /v1/chat/completions"),
        ])?;
        Ok(CompletionBody {
            prompt: fields.take_required("prompt")?,
            echo: fields.take("echo")?.unwrap_or(false),
            logprobs: fields.take("logprobs")?,
            output: response_format::take(&mut fields)?,
            parameters: Parameters::take(&mut fields)?,
            ignored: fields.into_ignored(),
        })
    }

    /// Returns the options of the first continuation of a prompt, with everything that a batch needs of the request.
    pub(crate) fn batch_options(&self, defaults: &Sampling) -> Result<ChatOptions, ApiError> {
        self.check_logprobs()?;
        Ok(ChatOptions {
            output: self.output.as_ref().map(|form| form.constraint.clone()),
            top_logprobs: self.logprobs,
            ..self.options(0, defaults)?
        })
    }

    fn check_logprobs(&self) -> Result<(), ApiError> {
        if self.logprobs.is_some_and(|logprobs| logprobs > MAX_LOGPROBS) {
            return Err(ApiError::parameter("logprobs", format!("logprobs must be at most {MAX_LOGPROBS}")));
        }
        Ok(())
    }

    /// Returns the prompts, which a model of this process or of another server gets.
    pub(crate) fn batch_prompts(&self) -> Result<Vec<BatchPrompt>, ApiError> {
        let text = |text: &String| BatchPrompt::Text(text.clone());
        let ids = |ids: &Vec<u32>| BatchPrompt::Ids(ids.clone());
        let (prompts, is_empty) = match &self.prompt {
            Prompt::Text(prompt) => (vec![text(prompt)], prompt.is_empty()),
            Prompt::Texts(texts) => {
                (few(texts)?.iter().map(text).collect(), texts.iter().any(String::is_empty))
            }
            Prompt::Ids(prompt) => (vec![ids(prompt)], prompt.is_empty()),
            Prompt::IdLists(lists) => {
                (few(lists)?.iter().map(ids).collect(), lists.iter().any(Vec::is_empty))
            }
        };
        if is_empty || prompts.is_empty() { Err(empty()) } else { Ok(prompts) }
    }

    /// Returns the prompts as texts, and refuses what no server of another model can do.
    pub(crate) fn texts(&self, model: &Model) -> Result<&[String], ApiError> {
        let name = model.name();
        if let Some(form) = &self.output {
            let message = format!(
                "{name} may be an upstream model, which does not support structured output for text completions; use \
                 /v1/chat/completions"
            );
            return Err(ApiError::parameter(form.field, message));
        }
        if self.logprobs.is_some() {
            let message = format!(
                "{name} may be an upstream model, for which log-probabilities are not available here"
            );
            return Err(ApiError::parameter("logprobs", message));
        }
        let texts = match &self.prompt {
            Prompt::Text(text) => std::slice::from_ref(text),
            Prompt::Texts(texts) => few(texts)?,
            Prompt::Ids(_) | Prompt::IdLists(_) => {
                let message = format!(
                    "{name} may be an upstream model with a different tokenizer; send the prompt as text"
                );
                return Err(ApiError::parameter("prompt", message));
            }
        };
        match texts.is_empty() || texts.iter().any(String::is_empty) {
            true => Err(empty()),
            false => Ok(texts),
        }
    }

    pub(crate) fn options(&self, choice: usize, defaults: &Sampling) -> Result<ChatOptions, ApiError> {
        Ok(ChatOptions {
            sampling: self.parameters.sampling(defaults)?,
            sampling_overrides: self.parameters.sampling_overrides()?,
            seed: self.parameters.seed_of(choice),
            max_tokens: Some(self.parameters.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) as usize),
            stop: self.parameters.stops(),
            ignore_eos: self.parameters.ignore_eos.unwrap_or(false),
            ..ChatOptions::default()
        })
    }

    pub(crate) fn request(
        &self,
        prompt: Vec<u32>,
        choice: usize,
        defaults: &Sampling,
    ) -> Result<GenerateRequest, ApiError> {
        self.check_logprobs()?;
        Ok(GenerateRequest {
            sampling: self.parameters.sampling(defaults)?,
            seed: self.parameters.seed_of(choice),
            max_tokens: Some(self.parameters.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) as usize),
            stop: self.parameters.stops(),
            ignore_eos: self.parameters.ignore_eos.unwrap_or(false),
            constraint: self.output.as_ref().map(|form| form.constraint.clone()),
            top_logprobs: self.logprobs,
            prompt_logprobs: self.logprobs.filter(|_| self.echo),
            ..GenerateRequest::new(prompt)
        })
    }
}

pub(crate) fn empty() -> ApiError {
    ApiError::parameter("prompt", "the prompt is empty; send at least one token")
}

/// Refuses too many prompts.
pub(crate) fn few<T>(prompts: &[T]) -> Result<&[T], ApiError> {
    match prompts.len() {
        ..=MAX_PROMPTS => Ok(prompts),
        many => {
            let message = format!("the request has {many} prompts; at most {MAX_PROMPTS} are allowed");
            Err(ApiError::parameter("prompt", message))
        }
    }
}
