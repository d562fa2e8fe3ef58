//! Pages of an executor on emulated CUDA devices: they continue after a restart from the disk, and at another engine that has its
//! prompts computed here, with the tokens of an engine that computes everything itself.

use std::sync::Arc;

use skep_cache::DiskTier;
use skep_model::{Activation, ExecutorOptions, KvDtype, emulated_executor};

use super::disk_pages::{cached, open, written};
use super::fixture::{checkpoint, executor_options, generate, greedy, loaded};
use super::split::{ALL_PAGES, Other, asking_options};
use crate::{Engine, EngineOptions};

/// A prompt of ten pages and some tokens.
const PROMPT: &str = "a long system prompt, which every request begins with. The rules are: a parcel of three kilograms goes to the \
                      north, and one of five kilograms to the south.";

/// Starts an engine whose model is divided among this many ranks. A row's bits do not depend on what came from elsewhere.
fn engine(ranks: usize, options: EngineOptions) -> Engine {
    let checkpoint = checkpoint();
    let executor = ExecutorOptions {
        kv: KvDtype::F16,
        activations: Some(Activation::F16),
        deterministic: true,
        tensor_parallel: ranks,
        max_sequences: 6,
        ..executor_options(1024)
    };
    let executor = emulated_executor(&checkpoint, executor).unwrap();
    let mut model = loaded(&checkpoint, executor);
    model.digest.weights = "weights".to_owned();
    Engine::start(model, options).unwrap()
}

#[tokio::test]
async fn a_restarted_engine_continues_from_the_disk_with_the_same_tokens() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let reference = engine(ranks, EngineOptions::default());
        let with_disk =
            |tier: &Arc<DiskTier>| EngineOptions { disk: Some(tier.clone()), ..EngineOptions::default() };
        let tier = open(folder.path());
        let before = engine(ranks, with_disk(&tier));
        let first = generate(&before, greedy(PROMPT, 12)).await.unwrap();
        assert_eq!(first.ids, generate(&reference, greedy(PROMPT, 12)).await.unwrap().ids, "{ranks} ranks");
        let pages = (PROMPT.len() + first.ids.len() - 1) / 16;
        written(&before, &tier, pages as u64).await;
        drop((before, tier));

        let tier = open(folder.path());
        let after = engine(ranks, with_disk(&tier));
        let mut next = greedy(PROMPT, 12);
        next.prompt.extend(&first.ids);
        next.prompt.extend("And then?".bytes().map(u32::from));
        let second = generate(&after, next.clone()).await.unwrap();
        assert_eq!((cached(&second), tier.status().read_pages), (16 * pages, pages as u64), "{ranks} ranks");
        assert_eq!(second.ids, generate(&reference, next).await.unwrap().ids, "{ranks} ranks");
    }
}

#[tokio::test]
async fn a_prompt_that_another_engine_computes_gives_the_same_tokens() {
    for ranks in [1, 2] {
        let expected = generate(&engine(ranks, EngineOptions::default()), greedy(PROMPT, 12)).await.unwrap();
        // On a busy machine an emulated device is slow, and a request waits the longer for a slower host.
        let there = engine(ranks, EngineOptions::default());
        let other = Other::with_rate(there, 64, ALL_PAGES, Some(2.0));
        let here = engine(ranks, asking_options(&other, &Arc::default()));
        let found = generate(&here, greedy(PROMPT, 12)).await.unwrap();
        let whole = (PROMPT.len() - 1) / 16 * 16;
        assert_eq!(
            (found.ids, found.finished.usage.prefilled_tokens as usize),
            (expected.ids, whole),
            "{ranks} ranks"
        );
    }
}
