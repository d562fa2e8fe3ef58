//! The order of a decoder's parts. The CPU executor and the CUDA executor both follow it.
//!
//! A layer has two parts. Each one reads the hidden rows through its norm, and its output is added to them:
//!
//! ```text
//! hidden += attention(attention_norm(hidden))
//! hidden += feed_forward(mlp_norm(hidden))
//! ```
//!
//! With norms after the parts (`Norms::BeforeAndAfter`), an output is normalized before it is added:
//! `hidden += after[0](attention(attention_norm(hidden)))`; see `Transformer::finish`.
//!
//! A part writes its output to the projected rows. The norm of the next part adds them to the hidden rows in its pass
//! over them. The norm before the head adds the last ones.

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

/// The rows that a part writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Hidden,
    Projected,
}

impl Part {
    pub(crate) fn output(self) -> Output {
        match self {
            Part::Embedding => Output::Hidden,
            Part::Attention { .. } | Part::FeedForward { .. } => Output::Projected,
        }
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
}
