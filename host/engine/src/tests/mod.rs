//! Tests of a whole engine over a small model with random weights and a byte-level tokenizer: the output must
//! not depend on concurrent requests, on cached pages, or on how steps are cut.

mod batching;
mod chunking;
mod constrained;
mod cuda_pages;
pub(crate) mod dice;
mod disk_pages;
pub(crate) mod draws;
mod evicted_pages;
pub(crate) mod executors;
mod faults;
pub(crate) mod fixture;
mod head_start;
mod health;
mod intercepted;
mod lifecycle;
mod lookahead;
mod masked_draws;
mod not_numbers;
mod other_read;
mod peer_pages;
mod prefix_cache;
mod random_schemas;
mod resumed;
mod rolled_back;
mod routing;
mod same_bits;
mod schema_corpus;
pub(crate) mod schema_fuzz;
mod seen_tokens;
mod sharing;
mod speculation;
mod split;
mod text;
pub(crate) mod unenforced;
mod warming;
mod windows;
