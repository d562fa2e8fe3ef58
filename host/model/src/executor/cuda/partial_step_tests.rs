//! Tests of started steps of which not all rows are used, and of those that contain known tokens.

use super::*;

/// Requests a token of the last step's row `row`, for the sequence with this seed.
fn asked(sampling: &Sampling, row: usize, seed: u64, step: u64) -> LogitRow<'_> {
    LogitRow::Sample(SampleRow { row, seed, step, ..SampleRow::plain(0, sampling) })
}

fn decode(start: usize, page: u32) -> BatchSequence {
    sequence(&[0], start, page, LogitsWanted::Last)
}

/// Starts `next` on one executor, computes it step by step on the other, and checks that both have the same bits.
fn assert_same_step(
    [plain, ahead]: [&mut CudaExecutor; 2],
    rows: &[LogitRow<'_>],
    mut next: StepAhead,
    case: &str,
) {
    let drawn = ahead.sample_and_begin(rows, &next).unwrap();
    assert!(drawn.has_begun, "{case}: the next step must have been started");
    assert_eq!(drawn.outputs, plain.sample(rows).unwrap(), "{case}");
    next.fill_in(&drawn.outputs.iter().map(|output| output.token).collect::<Vec<_>>());
    for executor in [&mut *plain, &mut *ahead] {
        executor.forward(&next.batch).unwrap();
    }
    assert!(ahead.ahead.is_none(), "{case}: the started step must have been used");
    for row in 0..next.batch.logit_rows() {
        assert!(ahead.logits(row).unwrap() == plain.logits(row).unwrap(), "{case}, row {row}");
    }
}

#[test]
fn a_started_step_takes_any_of_the_drawn_tokens_and_known_ones_and_not_all_rows_need_be_drawn() {
    let (ids, _) = expected("llama-gqa");
    let sampling = Sampling { temperature: 0.7, ..Sampling::default() };
    let row = |row, seed, step| asked(&sampling, row, seed, step);
    for (tensor_parallel, pipeline_parallel) in [(1, 1), (2, 2)] {
        let options = ExecutorOptions { tensor_parallel, pipeline_parallel, ..cuda_options() };
        let mut plain = load("llama-gqa", options.clone(), "0");
        let mut ahead = load("llama-gqa", options, "0");
        let prompt = |tokens: usize, page| sequence(&ids[..tokens], 0, page, LogitsWanted::Last);
        let prompts = Batch { sequences: vec![prompt(8, 9), prompt(5, 19), prompt(6, 29)] };
        for executor in [&mut plain, &mut ahead] {
            executor.forward(&prompts).unwrap();
        }
        // The second sequence ends with the token that is drawn now, and a fourth one joins.
        let batch = Batch { sequences: vec![decode(8, 9), decode(6, 29), prompt(7, 30)] };
        let rows = [row(0, 0, 0), row(1, 1, 0), row(2, 2, 0)];
        let next = StepAhead { batch, drawn: vec![0, 2] };
        assert_same_step([&mut plain, &mut ahead], &rows, next, "a prompt joins");
        // The first sequence has ended with its last token, so nobody draws from its row.
        let batch = Batch { sequences: vec![decode(7, 30), decode(7, 29)] };
        let rows = [row(1, 2, 1), row(2, 3, 0)];
        let next = StepAhead { batch, drawn: vec![1, 0] };
        assert_same_step([&mut plain, &mut ahead], &rows, next, "a row is not drawn");
        // All rows have ended but one, which is replayed with the others.
        let batch = Batch { sequences: vec![decode(8, 30)] };
        let next = StepAhead { batch, drawn: vec![0] };
        assert_same_step([&mut plain, &mut ahead], &[row(0, 3, 1)], next, "one row is left");
    }
}

#[test]
fn a_step_is_not_started_without_rows_of_which_each_continues_once() {
    let (ids, _) = expected("llama-gqa");
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut executor = load("llama-gqa", cuda_options(), "0");
    let prompts = [9, 19].map(|page| sequence(&ids[..8], 0, page, LogitsWanted::Last));
    executor.forward(&Batch { sequences: prompts.to_vec() }).unwrap();
    let rows = [asked(&sampling, 0, 0, 0), asked(&sampling, 1, 1, 0)];
    let both = Batch { sequences: vec![decode(8, 9), decode(8, 19)] };
    for drawn in [vec![], vec![0, 2], vec![1, 1], vec![0, 1, 1]] {
        let next = StepAhead { batch: both.clone(), drawn };
        let found = executor.sample_and_begin(&rows, &next).unwrap();
        assert!(!found.has_begun, "{next:?}");
    }
    let next = StepAhead { batch: both, drawn: vec![0, 1] };
    assert!(executor.sample_and_begin(&rows, &next).unwrap().has_begun);
}
