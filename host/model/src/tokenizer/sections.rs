//! Encodes a text section by section. A section is the text between two added tokens.
//!
//! Invariant: a text has the tokens that it would have if its literals spelled no added tokens. The space that some
//! vocabularies put before a text is put where their own libraries put it, and never into the middle of a section.

use std::ops::Range;

use tokenizers::normalizer::Range as In;
use tokenizers::normalizers::Sequence as Normalizers;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::{
    Model, NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
};

use super::{SectionCache, Tokenizer, broken};
use crate::error::ModelError;

/// The part before a text, which decides whether the text gets the space that some vocabularies put before texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// The text is the first one.
    Nothing,
    /// The text begins a section.
    SpecialToken,
    /// The text continues a section.
    Text,
}

/// The steps before merging that put a space before a section, as they are without the space. A step that puts none there
/// is absent.
pub(super) struct WithoutSpace {
    normalizer: Option<NormalizerWrapper>,
    after_special_token: Option<PreTokenizerWrapper>,
    after_text: Option<PreTokenizerWrapper>,
}

impl WithoutSpace {
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let pre_tokenizer = |before| {
            tokenizer.get_pre_tokenizer().and_then(|step| pre_tokenizer_without_space(step, before, true))
        };
        WithoutSpace {
            normalizer: tokenizer.get_normalizer().and_then(normalizer_without_space),
            after_special_token: pre_tokenizer(Before::SpecialToken),
            after_text: pre_tokenizer(Before::Text),
        }
    }
}

/// One section of a text.
struct Section<'a> {
    tokenizer: &'a Tokenizer,
    text: &'a str,
    /// The byte offset in the text that has the literals.
    start: usize,
    literals: &'a [Range<usize>],
    before: Before,
}

impl Section<'_> {
    fn encode(&self) -> Result<Vec<u32>, ModelError> {
        self.tokenizer.encode_section(self).map_err(|error| broken(error.to_string()))
    }

    /// Returns whether a literal overlaps the section.
    fn has_literals(&self) -> bool {
        self.is_literal(self.start..self.start + self.text.len())
    }

    /// Returns whether a literal overlaps a range of the text.
    fn is_literal(&self, range: Range<usize>) -> bool {
        let next = self.literals.partition_point(|literal| literal.end <= range.start);
        self.literals.get(next).is_some_and(|literal| literal.start < range.end)
    }
}

/// A part of a section, and its token if it is one.
type Part = (NormalizedString, Option<Vec<tokenizers::Token>>);

impl Tokenizer {
    /// Returns the token ids of a text. The byte ranges `literals`, which are in order, are plain text even if they spell
    /// added tokens.
    pub fn encode_sections(
        &self,
        text: &str,
        literals: &[Range<usize>],
        before: Before,
    ) -> Result<Vec<u32>, ModelError> {
        self.encode_each_section(text, literals, before, |section| section.encode())
    }

    /// Returns the token ids of a text as [`Tokenizer::encode_sections`] does. Sections that the same scope had encoded lately
    /// are taken from the cache.
    pub fn encode_known_sections(
        &self,
        text: &str,
        literals: &[Range<usize>],
        before: Before,
        (cache, scope): (&SectionCache, &str),
    ) -> Result<Vec<u32>, ModelError> {
        self.encode_each_section(text, literals, before, |section| {
            // The tokens of other sections depend on more than their text.
            if section.before != Before::SpecialToken || section.has_literals() {
                return section.encode();
            }
            let tokens = cache.get_or_encode(scope, section.text, || section.encode())?;
            Ok(tokens.to_vec())
        })
    }

    fn encode_each_section(
        &self,
        text: &str,
        literals: &[Range<usize>],
        before: Before,
        encode: impl Fn(Section<'_>) -> Result<Vec<u32>, ModelError>,
    ) -> Result<Vec<u32>, ModelError> {
        let (mut ids, mut at, mut before) = (Vec::new(), 0, before);
        let encode = |range: Range<usize>, before: Before| {
            let text = &text[range.clone()];
            encode(Section { tokenizer: self, text, start: range.start, literals, before })
        };
        for (range, id) in self.added_tokens_outside(text, literals) {
            ids.extend(encode(at..range.start, before)?);
            ids.push(id);
            (at, before) = (range.end, Before::SpecialToken);
        }
        ids.extend(encode(at..text.len(), before)?);
        Ok(ids)
    }

    /// Returns the token ids of a text that continues a section. No space is put before it, and none of it becomes an added
    /// token.
    pub fn encode_inside(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        self.encode_sections(text, std::slice::from_ref(&(0..text.len())), Before::Text)
    }

    fn encode_section(&self, section: &Section<'_>) -> tokenizers::Result<Vec<u32>> {
        let Section { text, start, before, .. } = *section;
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let bare = &self.without_space;
        let (normalizer, pre_tokenizer) = match before {
            Before::Nothing => (None, None),
            Before::SpecialToken => (None, bare.after_special_token.as_ref()),
            Before::Text => (bare.normalizer.as_ref(), bare.after_text.as_ref()),
        };
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = normalizer.or(self.inner.get_normalizer()) {
            normalizer.normalize(&mut normalized)?;
        }
        let is_literal = |range: Range<usize>| section.is_literal(start + range.start..start + range.end);
        let mut pieces = PreTokenizedString::from(normalized);
        pieces.split(|_, piece| self.split_at_normalized_tokens(piece, is_literal))?;
        if let Some(pre_tokenizer) = pre_tokenizer.or(self.inner.get_pre_tokenizer()) {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.merge(piece.get()))?;
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
        let tokens = splits.into_iter().flat_map(|(_, _, tokens)| tokens.iter().flatten());
        Ok(tokens.map(|token| token.id).collect())
    }

    /// Splits at the added tokens that are looked for in normalized text. `is_literal` says whether a range of the section
    /// overlaps a literal.
    fn split_at_normalized_tokens(
        &self,
        text: NormalizedString,
        is_literal: impl Fn(Range<usize>) -> bool,
    ) -> tokenizers::Result<Vec<Part>> {
        let mut found = self.added_tokens(text.get(), true);
        found.retain(|(range, _)| {
            text.convert_offsets(In::Normalized(range.clone())).is_some_and(|range| !is_literal(range))
        });
        if found.is_empty() {
            return Ok(vec![(text, None)]);
        }
        let slice = |range: Range<usize>| {
            text.slice(In::Normalized(range)).ok_or("an added token begins or ends within a character")
        };
        let (mut parts, mut at) = (Vec::new(), 0);
        for (range, id) in found {
            parts.push((slice(at..range.start)?, None));
            let token = tokenizers::Token::new(id, String::new(), (0, range.len()));
            parts.push((slice(range.clone())?, Some(vec![token])));
            at = range.end;
        }
        parts.push((slice(at..text.len())?, None));
        Ok(parts)
    }

    /// Returns the tokens of a word.
    fn merge(&self, word: &str) -> tokenizers::Result<Vec<tokenizers::Token>> {
        let model = self.inner.get_model();
        let mut tokens = Vec::new();
        for token in model.tokenize(word)? {
            // A vocabulary may allow text to merge into a special token. Such text is tokenized character by
            // character. The token of unknown text is special, too, but the text does not spell it.
            let spelled = word.get(token.offsets.0..token.offsets.1).unwrap_or_default();
            let is_special = self.is_special(token.id) && self.token_text(token.id) == Some(spelled);
            match is_special && spelled.chars().nth(1).is_some() {
                true => {
                    for character in spelled.chars() {
                        tokens.extend(model.tokenize(character.encode_utf8(&mut [0; 4]))?);
                    }
                }
                false => tokens.push(token),
            }
        }
        Ok(tokens)
    }

    /// Returns the added tokens in a text outside of its literals, in order.
    fn added_tokens_outside(&self, text: &str, literals: &[Range<usize>]) -> Vec<(Range<usize>, u32)> {
        let (mut found, mut at) = (Vec::new(), 0);
        for literal in literals.iter().cloned().chain(std::iter::once(text.len()..text.len())) {
            let between = self.added_tokens(&text[at..literal.start], false).into_iter();
            found.extend(between.map(|(range, id)| (at + range.start..at + range.end, id)));
            at = literal.end;
        }
        found
    }

    /// Returns the added tokens in a text, in order: those that are looked for in normalized text, or the others.
    fn added_tokens(&self, text: &str, normalized: bool) -> Vec<(Range<usize>, u32)> {
        if text.is_empty() || normalized && !self.has_normalized_tokens {
            return Vec::new();
        }
        let added = self.inner.get_added_vocabulary();
        let known = added.get_added_tokens_decoder();
        let is_wanted = |id: u32| known.get(&id).is_some_and(|token| token.normalized == normalized);
        let found = added.extract_and_normalize(None::<&NormalizerWrapper>, text);
        let splits = found.get_splits(OffsetReferential::Original, OffsetType::Byte).into_iter();
        let tokens = splits.filter_map(|(_, (start, end), tokens)| {
            let id = tokens.as_ref()?.first()?.id;
            is_wanted(id).then_some((start..end, id))
        });
        tokens.collect()
    }
}

fn normalizer_without_space(step: &NormalizerWrapper) -> Option<NormalizerWrapper> {
    match step {
        NormalizerWrapper::Prepend(_) => Some(Normalizers::new(Vec::new()).into()),
        NormalizerWrapper::Sequence(steps) => {
            let changed = with_changes(steps.as_ref(), |_, step| normalizer_without_space(step))?;
            Some(Normalizers::new(changed).into())
        }
        _ => None,
    }
}

/// Returns the step without the space that it puts before a text, or `None` if it stays as it is. Only if no step before it splits
/// the text (`is_first`), the space of an `Always` is put before the text alone, and not before each of its words.
fn pre_tokenizer_without_space(
    step: &PreTokenizerWrapper,
    before: Before,
    is_first: bool,
) -> Option<PreTokenizerWrapper> {
    let always = before == Before::Text && is_first;
    match step {
        PreTokenizerWrapper::Metaspace(step) => {
            let puts_space = match step.prepend_scheme {
                PrependScheme::First => true,
                PrependScheme::Always => always,
                PrependScheme::Never => false,
            };
            let bare = Metaspace::new(step.get_replacement(), PrependScheme::Never, step.get_split());
            puts_space.then(|| bare.into())
        }
        PreTokenizerWrapper::ByteLevel(step) => {
            (step.add_prefix_space && always).then(|| step.add_prefix_space(false).into())
        }
        PreTokenizerWrapper::Sequence(steps) => {
            let change = |index: usize, step: &PreTokenizerWrapper| {
                pre_tokenizer_without_space(step, before, is_first && index == 0)
            };
            Some(PreTokenizers::new(with_changes(steps.as_ref(), change)?).into())
        }
        _ => None,
    }
}

/// Returns the steps with their changes, or `None` if none changes.
fn with_changes<T: Clone>(steps: &[T], change: impl Fn(usize, &T) -> Option<T>) -> Option<Vec<T>> {
    let changed: Vec<Option<T>> = steps.iter().enumerate().map(|(index, step)| change(index, step)).collect();
    let is_changed = changed.iter().any(Option::is_some);
    let all = changed.into_iter().zip(steps).map(|(changed, step)| changed.unwrap_or_else(|| step.clone()));
    is_changed.then(|| all.collect())
}

#[cfg(test)]
#[path = "sections_tests.rs"]
mod tests;
