//! Runs targets manually: `cargo run -p skep-fuzz-targets --example by_hand -- SECONDS [TARGET…]`. Inputs
//! that cause a panic are saved.
//!
//! Use a dev build: it checks arithmetic for overflow, and the crates that do most of the work are optimized
//! in it too.

use skep_fuzz_targets::{Mutator, TARGETS, Target, run_watched};
use std::time::{Duration, Instant, SystemTime};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: u64 = arguments
        .next()
        .and_then(|seconds| seconds.parse().ok())
        .expect("the first argument is the number of seconds per target");
    let names: Vec<String> = arguments.collect();
    let mut panics = 0;
    for target in &TARGETS {
        if names.is_empty() || names.iter().any(|name| name == target.name) {
            panics += run_for(target, Duration::from_secs(seconds));
        }
    }
    std::process::exit(i32::from(panics > 0));
}

fn run_for(target: &Target, time: Duration) -> u64 {
    let seed = SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64);
    let mut mutator = Mutator::new(seed, target.seeds(), target.words);
    let (began, mut inputs, mut panics, mut slowest) = (Instant::now(), 0_u64, 0_u64, Duration::ZERO);
    while began.elapsed() < time {
        let input = mutator.next_input();
        let outcome = run_watched(target, &input);
        inputs += 1;
        if outcome.time > slowest {
            slowest = outcome.time;
            if slowest > Duration::from_secs(1) {
                keep(target, "slow", &input);
            }
        }
        if let Some(panic) = outcome.panic {
            panics += 1;
            println!("{}: {panic}", target.name);
            if panics <= 20 {
                keep(target, "panic", &input);
            }
        }
    }
    let seconds = began.elapsed().as_secs();
    println!(
        "{}: {inputs} inputs in {seconds} s (seed {seed}), {panics} panics, slowest input {slowest:?}",
        target.name
    );
    panics
}

fn keep(target: &Target, kind: &str, input: &[u8]) {
    let folder = std::env::temp_dir().join("skep-fuzz").join(target.name);
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let path = folder.join(format!("{kind}-{hash:016x}"));
    let kept = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, input));
    match kept {
        Ok(()) => println!("{}: saved {}", target.name, path.display()),
        Err(error) => println!("{}: an input could not be saved: {error}", target.name),
    }
}
