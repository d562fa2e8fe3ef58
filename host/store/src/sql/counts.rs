//! Counts that transactions add to rows that every host adds to, such as the tokens of a tenant on a day.
//!
//! A transaction holds a row that it has changed until it ends. If it counted in the middle, transactions of two hosts
//! could each hold a counter that the other one waits for, and many would wait for each other's other statements. So
//! the counts of a transaction are summed up and written just before its commit, in the order of their statements and
//! keys, which is the same on all hosts.

use super::{query::Query, value::Value};
use std::{borrow::Cow, collections::BTreeMap};

/// A part of the key of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KeyPart {
    Number(i64),
    Text(String),
}

/// The sums of a transaction, by statement and key.
#[derive(Default)]
pub(super) struct Counts(BTreeMap<(&'static str, Vec<KeyPart>), Vec<i64>>);

impl Counts {
    pub(super) fn add(&mut self, statement: &'static str, key: Vec<KeyPart>, amounts: &[i64]) {
        let sums = self.0.entry((statement, key)).or_insert_with(|| vec![0; amounts.len()]);
        for (sum, amount) in sums.iter_mut().zip(amounts) {
            *sum = sum.saturating_add(*amount);
        }
    }

    pub(super) fn take(&mut self) -> Vec<Query<'static>> {
        let statement = |((statement, key), sums): ((&str, Vec<KeyPart>), Vec<i64>)| {
            let key = key.into_iter().map(|part| match part {
                KeyPart::Number(number) => Value::Integer(Some(number)),
                KeyPart::Text(text) => Value::Text(Some(Cow::Owned(text))),
            });
            let sums = sums.into_iter().map(|sum| Value::Integer(Some(sum)));
            Query::with(statement.to_owned(), key.chain(sums).collect())
        };
        std::mem::take(&mut self.0).into_iter().map(statement).collect()
    }
}
