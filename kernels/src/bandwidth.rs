//! Measures how fast this machine reads memory, which is the upper bound for decode.
//!
//! Invariant: the buffer is much larger than any cache, so that the result measures memory.

use std::time::{Duration, Instant};

const BUFFER_WORDS: usize = 48 << 20; // 384 MiB
const MEASURE: Duration = Duration::from_millis(300);

/// Returns the gigabytes per second that `threads` threads read together. It takes about half a second.
pub fn measure_read_gb_per_s(threads: usize) -> f64 {
    let threads = threads.clamp(1, 1024);
    let share = BUFFER_WORDS / threads;
    let buffer: Vec<u64> = (0..(share * threads) as u64).collect();
    let rates = std::thread::scope(|scope| {
        let readers: Vec<_> =
            buffer.chunks_exact(share).map(|part| scope.spawn(move || read_rate(part))).collect();
        readers.into_iter().map(|reader| reader.join().unwrap_or(0.0)).sum::<f64>()
    });
    rates / 1e9
}

/// Returns the bytes per second of one thread that reads `part` repeatedly.
fn read_rate(part: &[u64]) -> f64 {
    let start = Instant::now();
    let mut bytes = 0u64;
    let mut sum = 0u64;
    while start.elapsed() < MEASURE {
        for chunk in part.chunks(1 << 20) {
            let mut lanes = [0u64; 32];
            for words in chunk.as_chunks::<32>().0 {
                for (lane, word) in lanes.iter_mut().zip(words) {
                    *lane ^= word;
                }
            }
            sum ^= lanes.iter().fold(0, |all, lane| all ^ lane);
            bytes += (chunk.len() * 8) as u64;
            if start.elapsed() >= MEASURE {
                break;
            }
        }
    }
    std::hint::black_box(sum);
    bytes as f64 / start.elapsed().as_secs_f64()
}
