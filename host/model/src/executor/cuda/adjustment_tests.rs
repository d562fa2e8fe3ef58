//! Tests of draws whose rows have more penalized tokens in all than a buffer has space for.

use super::*;
use crate::occurrences::Occurrences;
use crate::seen_tokens::SeenTokens;

/// Checks that the device draws all rows, and the same tokens as the host.
fn assert_drawn_on_the_device(executor: &mut CudaExecutor, rows: &[LogitRow<'_>]) {
    let drawn = executor.sample(rows).unwrap();
    assert!(executor.logits.get().is_none(), "the host needs no logits");
    for (row, drawn) in rows.iter().zip(drawn) {
        let expected = draw(Isa::detect(), executor.logits(row.row()).unwrap(), row).unwrap();
        assert_eq!(drawn, expected, "{row:?}");
    }
}

#[test]
fn more_adjustments_than_a_buffer_holds_are_drawn_on_the_device() {
    const ROWS: usize = 256;
    let (ids, _) = expected("llama-gqa");
    let options = ExecutorOptions { max_logit_rows: ROWS, ..cuda_options() };
    let mut executor = load("llama-gqa", options, "0");
    let batch = Batch { sequences: vec![sequence(&ids[..20], 0, 9, LogitsWanted::Tail(4))] };
    executor.forward(&batch).unwrap();
    let sampling = |at: usize| Sampling {
        temperature: [0.0, 0.9][at % 2],
        repetition_penalty: 1.1 + 0.01 * at as f32,
        frequency_penalty: 0.4,
        ..Sampling::default()
    };
    let samplings: Vec<Sampling> = (0..ROWS).map(sampling).collect();
    // Each row has other tokens, and 300 different ones.
    let tokens: Vec<u32> = (0..300 + 2 * ROWS as u32).map(|at| at * 11 % 320).collect();
    let row = |(at, sampling)| {
        let (prompt, output) = tokens[at..at + 300].split_at(100);
        LogitRow::Sample(SampleRow { seed: at as u64, prompt, output, ..SampleRow::plain(at % 4, sampling) })
    };
    let rows: Vec<LogitRow<'_>> = samplings.iter().enumerate().map(row).collect();
    assert!(ROWS * 300 > 70_000 && ROWS * 300 > executor.draws.most_adjustments);
    assert_drawn_on_the_device(&mut executor, &rows);
}

#[test]
fn a_buffer_is_filled_again_only_after_it_has_been_copied() {
    let (ids, _) = expected("llama-gqa");
    let mut executor = load("llama-gqa", cuda_options(), "0");
    executor.draws.most_adjustments = executor.limits.vocabulary_size;
    let tokens: Vec<u32> = (0..320).collect();
    let samplings = [1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0].map(|repetition_penalty| Sampling {
        temperature: 0.0,
        repetition_penalty,
        ..Sampling::default()
    });
    for length in 20..24 {
        // The rows differ, and each of them has a group of its own.
        let batch = Batch { sequences: vec![sequence(&ids[..length], 0, 9, LogitsWanted::Tail(7))] };
        executor.forward(&batch).unwrap();
        let row = |(row, sampling)| {
            let (banned, prompt) = tokens.split_at(20 * row);
            LogitRow::Sample(SampleRow { prompt, banned, ..SampleRow::plain(row, sampling) })
        };
        let rows: Vec<LogitRow<'_>> = samplings.iter().enumerate().map(row).collect();
        assert_drawn_on_the_device(&mut executor, &rows);
    }
}

#[test]
fn the_next_step_is_started_after_draws_in_several_groups() {
    let (ids, _) = expected("llama-gqa");
    let sampling =
        Sampling { temperature: 0.8, repetition_penalty: 1.4, presence_penalty: 0.3, ..Sampling::default() };
    for (tensor_parallel, pipeline_parallel) in [(1, 1), (2, 2)] {
        let options = ExecutorOptions { tensor_parallel, pipeline_parallel, ..cuda_options() };
        let mut plain = load("llama-gqa", options.clone(), "0");
        let mut ahead = load("llama-gqa", options, "0");
        ahead.draws.most_adjustments = ahead.limits.vocabulary_size;
        let vocabulary = ahead.limits.vocabulary_size;
        let mut pages = [9, 19, 29];
        let mut histories: Vec<Vec<u32>> =
            (0..3).map(|at| (0..400).map(|token| (token * 7 + at * 50) % 290).collect()).collect();
        let prompts = pages.map(|page| sequence(&ids[..8], 0, page, LogitsWanted::Last));
        for executor in [&mut plain, &mut ahead] {
            executor.forward(&Batch { sequences: prompts.to_vec() }).unwrap();
        }
        for step in 0..4 {
            let kept = |history: &Vec<u32>| {
                let (mut seen, mut occurrences) = (SeenTokens::new(vocabulary), Occurrences::default());
                seen.mark(history);
                occurrences.count(&history[400..]);
                (seen, occurrences)
            };
            let kept: Vec<_> = histories.iter().map(kept).collect();
            let row = |row: usize| {
                let (prompt, output) = histories[row].split_at(400);
                let (seen, occurrences) = &kept[row];
                LogitRow::Sample(SampleRow {
                    seed: row as u64,
                    step: step as u64,
                    prompt,
                    output,
                    seen: Some(seen),
                    occurrences: Some(occurrences),
                    ..SampleRow::plain(row, &sampling)
                })
            };
            let rows = [0, 1, 2].map(row);
            let decode = |page| sequence(&[0], 8 + step, page, LogitsWanted::Last);
            // The sequences continue in another order than that of the rows.
            let drawn = vec![2, 0, 1];
            let batch = Batch { sequences: drawn.iter().map(|row| decode(pages[*row])).collect() };
            let mut next = StepAhead { batch, drawn: drawn.clone() };
            let begun = ahead.sample_and_begin(&rows, &next).unwrap();
            assert!(begun.has_begun, "the next step must have been started");
            assert_eq!(begun.outputs, plain.sample(&rows).unwrap(), "step {step}");
            let tokens: Vec<u32> = begun.outputs.iter().map(|output| output.token).collect();
            next.fill_in(&tokens);
            for executor in [&mut plain, &mut ahead] {
                executor.forward(&next.batch).unwrap();
            }
            for row in 0..3 {
                assert!(ahead.logits(row).unwrap() == plain.logits(row).unwrap(), "step {step}, row {row}");
            }
            // The rows of the next step are in the order of its sequences.
            histories = drawn.iter().map(|row| [&histories[*row][..], &[tokens[*row]]].concat()).collect();
            pages = [2, 0, 1].map(|row: usize| pages[row]);
        }
    }
}
