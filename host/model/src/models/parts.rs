//! The order of a decoder's parts, with the norms before and after them. The CPU executor and the CUDA executor both follow it.
//!
//! A layer has two parts. Each one reads the hidden rows through its norm, and its output is added to them:
//!
//! ```text
//! hidden += attention(attention_norm(hidden))
//! hidden += feed_forward(mlp_norm(hidden))
//! ```
//!
//! In some families ([`Norms::follow_parts`]), the output goes through a second norm first:
//!
//! ```text
//! hidden += attention_norm_after(attention(attention_norm(hidden)))
//! hidden += mlp_norm_after(feed_forward(mlp_norm(hidden)))
//! ```
//!
//! A part writes its output to the projected rows. Its [`Completion`] follows once all ranks have added up their outputs. The norm
//! before the next part adds the projected rows to the hidden rows in its pass over them ([`Input::Sum`]). The norm before the
//! head adds the last ones.

use crate::config::{LayerStyle, Norms};

/// A part of a step. Ranks that share its weights add up their outputs before the next part begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Embedding,
    /// The attention of a layer. `adds` says whether its norm has projected rows to add.
    Attention {
        layer: usize,
        adds: bool,
    },
    /// The feed-forward part of a layer. Its norm adds the output of the attention.
    FeedForward {
        layer: usize,
    },
}

/// The rows that a part reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// The tokens of the step.
    Tokens,
    /// The norm of the hidden rows.
    Hidden,
    /// The norm of the hidden rows, to which it adds the projected rows first.
    Sum,
}

/// The rows that a part writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Hidden,
    Projected,
}

/// An operation on the output of a part, after all ranks have added up theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    Nothing,
    /// The hidden rows are multiplied by the factor of the embeddings.
    Scale,
    /// The norm after the part replaces the projected rows.
    Norm,
}

/// The completions of parts in a family, as its description has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completions {
    scale_embeddings: bool,
    norms: Norms,
}

impl From<&LayerStyle> for Completions {
    fn from(style: &LayerStyle) -> Self {
        Completions { scale_embeddings: style.embedding_scale.is_some(), norms: style.norms }
    }
}

impl Part {
    pub(crate) fn input(self) -> Input {
        match self {
            Part::Embedding => Input::Tokens,
            Part::Attention { adds: false, .. } => Input::Hidden,
            Part::Attention { adds: true, .. } | Part::FeedForward { .. } => Input::Sum,
        }
    }

    /// Returns the part whose norm adds this part's output to the hidden rows, in a stage with `layers` layers. Without one, the
    /// next stage or the head adds it.
    pub(crate) fn adder(self, layers: usize) -> Option<Part> {
        match self {
            Part::Embedding => None,
            Part::Attention { layer, .. } => Some(Part::FeedForward { layer }),
            Part::FeedForward { layer } => {
                Some(Part::Attention { layer: layer + 1, adds: true }).filter(|_| layer + 1 < layers)
            }
        }
    }

    pub(crate) fn output(self) -> Output {
        match self {
            Part::Embedding => Output::Hidden,
            Part::Attention { .. } | Part::FeedForward { .. } => Output::Projected,
        }
    }

    pub(crate) fn completion(self, completions: Completions) -> Completion {
        let (operation, is_wanted) = match self {
            Part::Embedding => (Completion::Scale, completions.scale_embeddings),
            Part::Attention { .. } | Part::FeedForward { .. } => {
                (Completion::Norm, completions.norms.follow_parts())
            }
        };
        if is_wanted { operation } else { Completion::Nothing }
    }
}

/// Returns the parts of a pipeline stage with `layers` layers, in order. `embeds` says whether the stage begins with
/// the tokens, and `adds` whether it begins with projected rows that are not added yet.
pub(crate) fn parts(embeds: bool, layers: usize, adds: bool) -> impl Iterator<Item = Part> {
    let embedding = embeds.then_some(Part::Embedding);
    embedding.into_iter().chain((0..layers).flat_map(move |layer| layer_parts(layer, adds || layer > 0)))
}

/// Returns the parts of one layer, in order.
pub(crate) fn layer_parts(layer: usize, adds: bool) -> [Part; 2] {
    [Part::Attention { layer, adds }, Part::FeedForward { layer }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_norm_of_a_stage_may_have_nothing_to_add() {
        let layer = |layer, adds| [Part::Attention { layer, adds }, Part::FeedForward { layer }];
        let first: Vec<_> = parts(true, 2, false).collect();
        assert_eq!(first, [[Part::Embedding].as_slice(), &layer(0, false), &layer(1, true)].concat());
        let later: Vec<_> = parts(false, 2, true).collect();
        assert_eq!(later, [layer(0, true), layer(1, true)].concat());
    }

    #[test]
    fn the_part_after_another_adds_its_output() {
        for (embeds, adds) in [(true, false), (false, true)] {
            let all: Vec<_> = parts(embeds, 3, adds).collect();
            for (index, part) in all.iter().enumerate() {
                let next = all.get(index + 1).copied();
                let adds_it = |next: &Part| part.output() == Output::Projected && next.input() == Input::Sum;
                assert_eq!(part.adder(3), next.filter(adds_it), "{part:?}");
            }
        }
    }

    #[test]
    fn norms_follow_the_parts_of_a_layer_in_families_that_have_them() {
        let completed = |norms, embedding_scale| {
            let style = LayerStyle { norms, embedding_scale, ..LayerStyle::default() };
            parts(true, 1, false).map(|part| part.completion((&style).into())).collect::<Vec<_>>()
        };
        let (nothing, norm) = (Completion::Nothing, Completion::Norm);
        assert_eq!(completed(Norms::Before, None), [nothing; 3]);
        assert_eq!(completed(Norms::Before, Some(2.0)), [Completion::Scale, nothing, nothing]);
        for norms in [Norms::BeforeAndAfter, Norms::BeforeAndAfterPlusOne] {
            assert_eq!(completed(norms, None), [nothing, norm, norm]);
        }
    }

    #[test]
    fn a_part_reads_the_sum_of_what_came_before_it() {
        let inputs = |parts: &[Part]| parts.iter().map(|part| part.input()).collect::<Vec<_>>();
        let first: Vec<_> = parts(true, 2, false).collect();
        let (tokens, hidden, sum) = (Input::Tokens, Input::Hidden, Input::Sum);
        assert_eq!(inputs(&first), [tokens, hidden, sum, sum, sum]);
        let later: Vec<_> = parts(false, 1, true).collect();
        assert_eq!(inputs(&later), [sum, sum]);
    }
}
