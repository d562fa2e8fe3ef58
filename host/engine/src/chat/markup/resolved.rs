//! A markup with the tokens of one vocabulary, as the constraint on an output needs it.

use skep_model::Tokenizer;

use super::{CallForm, Markup, Parameters, Part, hermes};
use crate::{CallMarkup, CallPart, ObjectMarkup, ParameterMarkup, PartsMarkup};

/// Returns the markup of calls. Without a tokenizer, all of it is text.
pub(in crate::chat) fn call_markup(markup: &Markup, tokenizer: Option<&Tokenizer>) -> CallMarkup {
    let reserved = markup.reserved.iter().map(|text| (*text).to_owned()).collect();
    let CallForm::Parts(parts) = &markup.call else {
        return CallMarkup::Object(ObjectMarkup {
            open: hermes::OPEN.to_owned(),
            close: hermes::CLOSE.to_owned(),
            between: hermes::BETWEEN.to_owned(),
            open_is_special: tokenizer.is_some_and(|tokenizer| special(tokenizer, hermes::OPEN).is_some()),
            reserved,
        });
    };
    let resolver = Resolver { tokens: markup.tokens, tokenizer };
    CallMarkup::Parts(PartsMarkup {
        before_text: resolver.parts(parts.before_text),
        before: resolver.parts(parts.before),
        call: resolver.parts(parts.call),
        between: resolver.parts(parts.between),
        after: resolver.parts(parts.after),
        only_first: parts.only_first,
        reserved,
    })
}

/// Returns the id of a special token with this text.
pub(in crate::chat) fn special(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    tokenizer.token_id(text).filter(|id| tokenizer.is_special(*id))
}

struct Resolver<'a> {
    tokens: &'static [&'static str],
    tokenizer: Option<&'a Tokenizer>,
}

impl Resolver<'_> {
    fn parts(&self, parts: &[Part]) -> Vec<CallPart> {
        let resolve = |part: &Part| match part {
            Part::Text(text) => self.text(text),
            Part::Gap(text) => vec![CallPart::Gap((*text).to_owned())],
            Part::Name => vec![CallPart::Name],
            Part::Number => vec![CallPart::Number],
            Part::Id => vec![CallPart::Id],
            Part::Arguments => vec![CallPart::Arguments],
            Part::Parameters(parameters) => vec![CallPart::Parameters(self.parameters(parameters))],
        };
        parts.iter().flat_map(resolve).collect()
    }

    fn parameters(&self, parameters: &Parameters) -> ParameterMarkup {
        let Parameters { before_name, before_string, before_json, close, space } = parameters;
        ParameterMarkup {
            before_name: self.text(before_name),
            before_string: self.text(before_string),
            before_json: self.text(before_json),
            after_value: self.text(&format!("{}{close}{}", space.0, space.1)),
            close: (*close).to_owned(),
        }
    }

    /// Splits a text at the special tokens of the vocabulary.
    fn text(&self, text: &str) -> Vec<CallPart> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let found = |token: &&'static str| {
                let id = self.tokenizer.and_then(|tokenizer| special(tokenizer, token))?;
                Some((rest.find(token)?, std::cmp::Reverse(token.len()), *token, id))
            };
            let Some((at, _, token, id)) = self.tokens.iter().filter_map(found).min() else {
                parts.push(CallPart::Text(rest.to_owned()));
                break;
            };
            if at > 0 {
                parts.push(CallPart::Text(rest[..at].to_owned()));
            }
            parts.push(CallPart::Token(id, token.to_owned()));
            rest = &rest[at + token.len()..];
        }
        parts
    }
}
