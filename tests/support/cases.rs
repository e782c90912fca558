//! How many cases the properties are tried with, and which.

use proptest::test_runner::{Config, RngSeed};

/// So many cases, the same ones in every run; with `PROPTEST_CASES`, so many
/// others.
pub fn cases(default: u32) -> Config {
    let mut config =
        Config { failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = default;
        config.rng_seed = RngSeed::Fixed(u64::from(default));
    }
    config
}
