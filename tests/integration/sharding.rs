//! The default model divided among in-process ranks gives the same tokens as on one rank.

use skep_model::{
    Batch, BatchSequence, ExecutorOptions, KvDtype, LoadedModel, LogitRow, LogitsWanted, PAGE_TOKENS, PageId,
    SampleRow, Sampling, SpecialTokens,
};

use crate::harness::model_path;

const PROMPT: &str =
    "The three laws of thermodynamics describe how heat, work and temperature behave. In short:";
const GENERATED: usize = 32;

#[test]
fn greedy_tokens_match_those_of_one_rank() {
    let whole = greedy(1, 1);
    for (tensor, stages) in [(3, 1), (1, 2), (3, 2)] {
        assert_eq!(greedy(tensor, stages), whole, "{tensor} × {stages} ranks");
    }
}

fn greedy(tensor_parallel: usize, pipeline_parallel: usize) -> Vec<u32> {
    let options = ExecutorOptions {
        // Ranks add up in another order. Where attention rounds to BF16, that may choose between two tokens that are alike.
        kv: KvDtype::F32,
        kv_tokens: Some(256),
        max_batch_tokens: 16,
        tensor_parallel,
        pipeline_parallel,
        ..ExecutorOptions::default()
    };
    let mut model = LoadedModel::open("default", model_path(), options.clone()).unwrap();
    let mut tokens = model.tokenizer.encode(PROMPT, SpecialTokens::Literal).unwrap();
    let prompt = tokens.len();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut computed = 0;
    while tokens.len() < prompt + GENERATED {
        // The prompt is computed in chunks, then one token at a time.
        let end = tokens.len().min(computed + options.max_batch_tokens);
        let sequence = BatchSequence {
            tokens: tokens[computed..end].to_vec(),
            start: computed,
            pages: (0..end.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect(),
            logits: LogitsWanted::Last,
        };
        model.executor.forward(&Batch { sequences: vec![sequence] }).unwrap();
        computed = end;
        if end == tokens.len() {
            let row = SampleRow::plain(0, &sampling);
            tokens.push(model.executor.sample(&[LogitRow::Sample(row)]).unwrap()[0].token);
        }
    }
    tokens.split_off(prompt)
}
