//! Tests of sharding: the parts make up the whole, every query head gets its keys, and blocks are
//! never split.

use super::*;
use crate::gguf::writer::{GgufWriter, quantized_llama, tiny_llama};

#[test]
fn parts_are_whole_units_and_cover_the_whole() {
    for (whole, unit, ranks) in
        [(320, 1, 4), (320, 1, 3), (1536, 32, 3), (1536, 256, 4), (96, 32, 2), (5, 1, 7)]
    {
        let mut end = 0;
        let mut lengths = Vec::new();
        for rank in 0..ranks {
            let part = Shard { rank, ranks }.part(whole, unit);
            assert_eq!((part.start, part.len() % unit), (end, 0), "{whole} by {unit} over {ranks}");
            end = part.end;
            lengths.push(part.len());
        }
        assert_eq!(end, whole);
        assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= unit, "{lengths:?}");
    }
}

#[test]
fn every_query_head_finds_its_own_keys() {
    let checkpoint = open(&tiny_llama());
    for (heads, kv_heads) in [(4, 2), (9, 3), (12, 4), (32, 8), (6, 1), (5, 5)] {
        let config =
            ModelConfig { head_count: heads, kv_head_count: kv_heads, ..checkpoint.config().clone() };
        for ranks in (1..=heads).filter(|ranks| heads % ranks == 0) {
            let mut next = 0;
            for rank in 0..ranks {
                let part = Shard { rank, ranks }.heads(&config);
                assert_eq!(part.query.start, next);
                next = part.query.end;
                let group = part.query.len() / part.kv.len();
                for (index, head) in part.query.clone().enumerate() {
                    let found = part.kv[index / group];
                    assert_eq!(
                        found,
                        head / (heads / kv_heads),
                        "head {head} of {heads}, rank {rank} of {ranks}"
                    );
                }
                if kv_heads % ranks == 0 {
                    assert_eq!(part.kv.len(), kv_heads / ranks, "no KV head may be held twice without need");
                }
            }
            assert_eq!(next, heads);
        }
    }
}

#[test]
fn adjacent_kv_heads_are_one_range() {
    let heads = Heads { query: 0..5, kv: vec![0, 1, 1, 2, 4] };
    assert_eq!(heads.kv_rows(8), ShardPlan::Rows(vec![0..16, 8..24, 32..40]));
    assert_eq!(heads.kv_rows(8).rows(64), 40);
}

#[test]
fn rejects_rank_counts_that_split_heads_or_blocks_and_lists_possible_ones() {
    let checkpoint = open(&quantized_llama(96));
    for (ranks, name, possible) in [
        (3, "tensor_parallel: 3 does not divide the 4 attention heads", "possible values: 1, 2"),
        (
            4,
            "tensor `model.layers.0.self_attn.o_proj.weight`: tensor_parallel 4 would split its Q8_0 blocks of 32",
            "possible values: 1, 2",
        ),
    ] {
        let error = check(&checkpoint, ranks).unwrap_err().to_string();
        assert!(error.starts_with(name) && error.ends_with(possible), "{error}");
    }
    check(&checkpoint, 2).unwrap();
    let error = check(&open(&quantized_llama(32)), 2).unwrap_err().to_string();
    let name = "tensor `model.layers.0.mlp.down_proj.weight`";
    assert!(error.starts_with(name) && error.ends_with("possible values: 1"), "{error}");
}

fn open(writer: &GgufWriter) -> Checkpoint {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, writer.build()).unwrap();
    Checkpoint::open(&path).unwrap()
}
