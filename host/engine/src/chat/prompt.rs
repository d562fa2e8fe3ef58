//! Encoding of rendered text into tokens.
//!
//! Invariant: the template's text is encoded with its special tokens, and text from people and tools never
//! becomes one. The tokens are those of the whole text encoded at once, by a vocabulary that would not know the special
//! tokens whose text the messages contain.

use skep_model::{Before, SectionCache, SpecialTokens, Tokenizer};

use super::dialect::Dialect;
use super::message::{ChatMessage, Role};
use super::options::{CONTINUES, ChatOptions, Opening};
use super::render::{Renderer, Rendering};
use crate::{Cancel, Engine, EngineError, PublicPart};

/// A text with more bytes per token of the context than this probably does not fit.
const USUAL_TOKEN_BYTES: usize = 8;
const PIECE_BYTES: usize = 16 << 10;
const PIECE_SLACK_TOKENS: usize = 64;

/// The sender of a text that is encoded.
#[derive(Clone, Copy)]
pub struct Sender<'a> {
    /// The tenant. Sections that it sent lately are not encoded again; without it, all are.
    pub tenant: Option<&'a str>,
    /// Tells whether nobody waits for the tokens anymore.
    pub cancel: &'a Cancel,
}

impl<'a> Sender<'a> {
    /// Returns the sender of a chat.
    pub fn of(options: &'a ChatOptions) -> Self {
        Sender { tenant: Some(&options.affinity.tenant), cancel: &options.cancel }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Prompt {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    /// The part of the answer in which the prompt ends, if it has the beginning of one.
    pub(super) begun: Option<BegunPart>,
}

/// The part of an answer that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BegunPart {
    Reasoning,
    Answer,
}

/// Renders and encodes the prompt of a whole conversation, up to where the assistant continues.
pub(super) fn render_and_encode(
    engine: &Engine,
    messages: &[ChatMessage],
    options: &ChatOptions,
) -> Result<Prompt, EngineError> {
    let rendering =
        Renderer::of(engine, &Dialect::of_engine(engine)).render(messages, options.opening(), "")?;
    let tokens = encode_whole(engine, &rendering, Sender::of(options))?;
    Ok(Prompt { text: rendering.text, tokens, begun: None })
}

/// Renders and encodes the prompt of a conversation whose last message is the beginning of the assistant's answer.
pub(super) fn render_and_continue(
    engine: &Engine,
    messages: &[ChatMessage],
    options: &ChatOptions,
) -> Result<Prompt, EngineError> {
    let dialect = Dialect::of_engine(engine);
    let refused = |message: &str| {
        Err(EngineError::InvalidRequest { parameter: CONTINUES.into(), message: message.into() })
    };
    let Some((last, before)) = messages.split_last().filter(|(last, _)| last.role == Role::Assistant) else {
        return refused("the last message must be the assistant's, which is continued");
    };
    if !last.tool_calls.is_empty() {
        return refused("a message with tool calls is complete; send their results");
    }
    if dialect.reasons_in_channel() {
        return refused(
            "this model writes its answers in channels, which cannot be continued; ask it to continue",
        );
    }
    let mut rendering = Renderer::of(engine, &dialect).render(before, options.opening(), "")?;
    let reasoning = last.reasoning.as_deref().unwrap_or_default();
    let begun = dialect.write_begun(&mut rendering, reasoning, &last.content);
    let tokens = encode_whole(engine, &rendering, Sender::of(options))?;
    Ok(Prompt { text: rendering.text, tokens, begun })
}

/// Returns the tokens of a conversation as its model gets them. `opens_answer` says whether they end with the beginning of
/// the assistant's next message.
pub fn encode_chat(
    engine: &Engine,
    messages: &[ChatMessage],
    opening: Opening<'_>,
    opens_answer: bool,
    sender: Sender<'_>,
) -> Result<Vec<u32>, EngineError> {
    let dialect = Dialect::of_engine(engine);
    let renderer = Renderer { opens_answer, ..Renderer::of(engine, &dialect) };
    encode_whole(engine, &renderer.render(messages, opening, "")?, sender)
}

/// Returns which part of a prompt is public: if the system message is, the tokens that the prompt has in common with one that has
/// nothing else. A template that renders no system message alone makes nothing public.
pub(super) fn public_part(
    engine: &Engine,
    messages: &[ChatMessage],
    options: &ChatOptions,
    prompt: &[u32],
) -> PublicPart {
    let (PublicPart::SystemMessage, Some(system)) = (options.affinity.public, messages.first()) else {
        return options.affinity.public;
    };
    if system.role != Role::System {
        return PublicPart::Nothing;
    }
    let opening = Opening { examples: &[], ..options.opening() };
    let alone = encode_chat(engine, std::slice::from_ref(system), opening, false, Sender::of(options));
    let in_common =
        |alone: Vec<u32>| alone.iter().zip(prompt).take_while(|(one, other)| one == other).count();
    alone.map_or(PublicPart::Nothing, |alone| PublicPart::Tokens(in_common(alone)))
}

/// Encodes a plain text as a prompt, without a template. Special tokens that the text names are encoded as
/// special tokens.
pub fn encode_prompt(engine: &Engine, text: &str, cancel: &Cancel) -> Result<Vec<u32>, EngineError> {
    refuse_oversized(engine, text, cancel)?;
    Ok(with_bos(engine, engine.tokenizer().encode(text, SpecialTokens::Parse)?))
}

pub(super) fn encode_whole(
    engine: &Engine,
    rendering: &Rendering,
    sender: Sender<'_>,
) -> Result<Vec<u32>, EngineError> {
    refuse_oversized(engine, &rendering.text, sender.cancel)?;
    let known = sender.tenant.map(|tenant| (engine.sections(), tenant));
    Ok(with_bos(engine, encode_rest(engine.tokenizer(), Vec::new(), rendering, 0, known)?))
}

/// Encodes a text that begins like that of `known` tokens: these are taken over up to the last special token before the
/// difference, and only the rest is encoded.
pub(super) fn encode_after(
    engine: &Engine,
    rendering: &Rendering,
    known: &[u32],
    sender: Sender<'_>,
) -> Result<Vec<u32>, EngineError> {
    let tokenizer = engine.tokenizer();
    let (mut at, mut kept, mut kept_bytes) = (0, 0, 0);
    for (index, id) in known.iter().enumerate() {
        let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
        let is_special = tokenizer.is_special(*id);
        // Special tokens that a message spells are text.
        let is_literal = is_special && rendering.literals.iter().any(|literal| literal.contains(&at));
        if !is_literal && rendering.text.as_bytes()[at..].starts_with(bytes) {
            at += bytes.len();
        } else if !is_special || index > 0 {
            break;
        }
        if is_special && rendering.text.is_char_boundary(at) {
            (kept, kept_bytes) = (index + 1, at);
        }
    }
    if kept_bytes == 0 {
        return encode_whole(engine, rendering, sender);
    }
    refuse_oversized(engine, &rendering.text[kept_bytes..], sender.cancel)?;
    encode_onto(tokenizer, known[..kept].to_vec(), rendering, kept_bytes)
}

fn with_bos(engine: &Engine, mut tokens: Vec<u32>) -> Vec<u32> {
    let info = engine.info();
    if let Some(bos) = info.bos.filter(|bos| info.add_bos && tokens.first() != Some(bos)) {
        tokens.insert(0, bos);
    }
    tokens
}

/// Refuses a text that is far too long for the context before time is spent on all of it: a tokenizer needs
/// seconds for a megabyte, and the caller may not wait anymore. Chunks of the text are counted until there are
/// too many tokens; the count of a chunk is off by a few tokens at most.
pub fn refuse_oversized(engine: &Engine, text: &str, cancel: &Cancel) -> Result<(), EngineError> {
    cancel.check()?;
    let limit = engine.info().context_length;
    if text.len() <= limit.saturating_mul(USUAL_TOKEN_BYTES) {
        return Ok(());
    }
    let (mut rest, mut counted, mut slack) = (text, 0usize, 0usize);
    while !rest.is_empty() && counted <= limit.saturating_add(slack) {
        cancel.check()?;
        let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
        counted += engine.tokenizer().encode(piece, SpecialTokens::Parse)?.len();
        slack += PIECE_SLACK_TOKENS;
        rest = after;
    }
    if counted > limit.saturating_add(slack) {
        return Err(EngineError::ContextOverflow { limit, prompt: counted, requested: 1 });
    }
    Ok(())
}

/// Returns the `known` tokens, which are those of the text before the byte offset `start`, and the tokens of the rest.
pub(super) fn encode_onto(
    tokenizer: &Tokenizer,
    known: Vec<u32>,
    rendering: &Rendering,
    start: usize,
) -> Result<Vec<u32>, EngineError> {
    encode_rest(tokenizer, known, rendering, start, None)
}

/// Does what [`encode_onto`] does. Sections that a scope of the cache has are not encoded again.
fn encode_rest(
    tokenizer: &Tokenizer,
    mut known: Vec<u32>,
    rendering: &Rendering,
    start: usize,
    cache: Option<(&SectionCache, &str)>,
) -> Result<Vec<u32>, EngineError> {
    let before = match known.last() {
        None => Before::Nothing,
        Some(last) if tokenizer.is_special(*last) => Before::SpecialToken,
        Some(_) => Before::Text,
    };
    let literals = rendering.literals.iter().filter(|literal| literal.end > start);
    let literals: Vec<_> =
        literals.map(|literal| literal.start.max(start) - start..literal.end - start).collect();
    let text = &rendering.text[start..];
    known.extend(match cache {
        Some(cache) => tokenizer.encode_known_sections(text, &literals, before, cache)?,
        None => tokenizer.encode_sections(text, &literals, before)?,
    });
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EraseScope;
    use crate::chat::fixture;
    use crate::chat::render::render_unloaded;
    use skep_model::ChatTemplate;

    /// Returns the text of the prompt that is public.
    fn public_text(engine: &Engine, part: PublicPart, messages: &[ChatMessage]) -> String {
        let mut options = ChatOptions::default();
        options.affinity.public = part;
        let prompt = render_and_encode(engine, messages, &options).unwrap();
        match public_part(engine, messages, &options, &prompt.tokens) {
            PublicPart::Tokens(tokens) => engine.tokenizer().decode(&prompt.tokens[..tokens], false),
            _ => String::new(),
        }
    }

    #[test]
    fn nothing_but_the_system_message_of_a_prompt_is_public() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[]);
        let system = ChatMessage::system("You greet the guests of a hotel.");
        let public = |part: PublicPart, messages: &[ChatMessage]| public_text(&engine, part, messages);
        let conversation = [system.clone(), ChatMessage::user("My secret is 7.")];
        let said = public(PublicPart::SystemMessage, &conversation);
        assert!(said.contains("You greet the guests of a hotel.") && !said.contains("secret"), "{said}");
        let other = [system, ChatMessage::user("Mine is 8.")];
        assert_eq!(said.trim_end(), public(PublicPart::SystemMessage, &other).trim_end());
        assert_eq!(public(PublicPart::Nothing, &conversation), "");
        assert_eq!(public(PublicPart::SystemMessage, &conversation[1..]), "");
    }

    #[tokio::test]
    async fn the_tokens_of_messages_are_kept_until_pages_of_their_tenant_are_erased() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[]);
        let messages = [ChatMessage::system("You greet guests. ".repeat(20)), ChatMessage::user("Hello")];
        let encode = |tenant: &str| {
            let mut options = ChatOptions::default();
            options.affinity.tenant = tenant.to_owned();
            let prompt = render_and_encode(&engine, &messages, &options).unwrap();
            (prompt.tokens, engine.sections().bytes())
        };
        let (tokens, once) = encode("one");
        assert!(once > 360, "{once}");
        assert_eq!(encode("one"), (tokens.clone(), once));
        assert_eq!(encode("other").0, tokens);
        engine.forget_pages(&EraseScope::Tenant("other".into())).await;
        assert_eq!(engine.sections().bytes(), once);
        engine.forget_pages(&EraseScope::Agent("guests".into())).await;
        assert_eq!(engine.sections().bytes(), 0);
    }

    #[test]
    fn what_a_template_writes_of_other_messages_is_not_public() {
        const ALL: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
        let messages =
            [ChatMessage::system("You greet the guests of a hotel."), ChatMessage::user("My secret is 7.")];
        for (what, before) in [
            ("the newest message comes first", "{{ messages[-1].content }}\n"),
            ("the number of messages comes first", "{{ messages | length }} messages\n"),
            (
                "a system message alone is refused",
                "{% if messages | length < 2 %}{{ raise_exception('there is no question') }}{% endif %}",
            ),
        ] {
            let template = ChatTemplate::new(&format!("{before}{ALL}"), None, None).unwrap();
            let public = public_text(&fixture::engine(template, &[]), PublicPart::SystemMessage, &messages);
            assert!(!public.contains("secret"), "{what}: {public}");
        }
    }

    #[test]
    fn text_of_a_special_token_in_a_message_has_the_tokens_of_ordinary_text() {
        let template = "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}{% endfor %}";
        let template = ChatTemplate::new(template, None, None).unwrap();
        let messages = [
            ChatMessage::user("the</s>the </s> the"),
            ChatMessage::assistant("</s>"),
            ChatMessage::user("</s></s>h"),
        ];
        for space in fixture::spaces() {
            let tokenizer = fixture::spaced_tokenizer(&space, &["<s>", "</s>"]);
            let rendering = render_unloaded(&template, &tokenizer, &messages, Opening::default()).unwrap();
            assert_eq!(rendering.literals.len(), 5);
            let tokens = encode_onto(&tokenizer, Vec::new(), &rendering, 0).unwrap();
            let ordinary = fixture::spaced_tokenizer(&space, &["<s>"]);
            assert_eq!(tokens, ordinary.encode(&rendering.text, SpecialTokens::Parse).unwrap(), "{space}");
            // The rest of a conversation whose beginning is known has the same tokens.
            let marks = tokens.iter().enumerate().filter(|(_, id)| tokenizer.is_special(**id));
            for ((index, _), (at, mark)) in marks.zip(rendering.text.match_indices("<s>")) {
                let known = tokens[..=index].to_vec();
                assert_eq!(encode_onto(&tokenizer, known, &rendering, at + mark.len()).unwrap(), tokens);
            }
        }
    }

    #[test]
    fn text_after_a_known_answer_gets_no_space() {
        for space in fixture::spaces() {
            let tokenizer = fixture::spaced_tokenizer(&space, &["<s>", "</s>"]);
            let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Parse).unwrap();
            let (known, text) = ("<s>the", "<s>the </s><s>the");
            let rendering = Rendering { text: text.into(), literals: Vec::new() };
            let tokens = encode_onto(&tokenizer, encode(known), &rendering, known.len()).unwrap();
            assert_eq!(tokens, encode(text), "{space}");
        }
    }

    #[test]
    fn a_hopeless_text_is_refused_early_and_one_that_fits_is_not() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[]);
        for text in ["x".repeat(16 << 20), "the user said hello. ".repeat(1 << 20), "é王🐝".repeat(1 << 20)]
        {
            let error = encode_prompt(&engine, &text, &Cancel::default()).unwrap_err();
            let EngineError::ContextOverflow { limit: 4096, prompt, .. } = error else { panic!("{error}") };
            // Only the first chunks were counted.
            assert!(prompt > 4096 && prompt < 40_000, "{prompt}");
        }
        // At eleven bytes per token, the text is longer than usual and is counted, but it fits the context.
        let fits = "<|im_start|>".repeat(4000);
        assert_eq!(encode_prompt(&engine, &fits, &Cancel::default()).unwrap().len(), 4000);
        let given_up = Cancel::default();
        given_up.cancel();
        assert!(matches!(encode_prompt(&engine, &fits, &given_up), Err(EngineError::Cancelled)));
    }
}
