//! Statements that are put together from parts.

use super::{
    query::{Query, Typed},
    row::Column,
    value::{IntoValue, Value},
};
use std::fmt::{Display, Write as _};

/// A statement whose text depends on its data. Values are bound and never part of the text.
pub(crate) struct QueryBuilder<'q> {
    sql: String,
    values: Vec<Value<'q>>,
}

/// Appends parts with a separator between them.
pub(crate) struct Separated<'b, 'q> {
    builder: &'b mut QueryBuilder<'q>,
    separator: &'static str,
    is_first: bool,
}

impl<'q> QueryBuilder<'q> {
    pub(crate) fn new(sql: impl Into<String>) -> Self {
        QueryBuilder { sql: sql.into(), values: Vec::new() }
    }

    pub(crate) fn push(&mut self, sql: impl Display) -> &mut Self {
        let _ = write!(self.sql, "{sql}");
        self
    }

    pub(crate) fn push_bind(&mut self, value: impl IntoValue<'q>) -> &mut Self {
        self.values.push(value.into_value());
        self.sql.push('?');
        self
    }

    pub(crate) fn separated<'b>(&'b mut self, separator: &'static str) -> Separated<'b, 'q> {
        Separated { builder: self, separator, is_first: true }
    }

    /// Appends a `VALUES` clause with one row for each item.
    pub(crate) fn push_values<I: IntoIterator>(
        &mut self,
        items: I,
        mut push: impl FnMut(Separated<'_, 'q>, I::Item),
    ) -> &mut Self {
        self.sql.push_str("VALUES ");
        for (index, item) in items.into_iter().enumerate() {
            self.sql.push_str(if index == 0 { "(" } else { ", (" });
            push(self.separated(", "), item);
            self.sql.push(')');
        }
        self
    }

    pub(crate) fn build(self) -> Query<'q> {
        Query::with(self.sql, self.values)
    }

    pub(crate) fn build_query_scalar<T: Column>(self) -> Typed<'q, T> {
        Query::typed(self.build(), |row| T::read(row, 0))
    }
}

impl<'q> Separated<'_, 'q> {
    pub(crate) fn push_bind(&mut self, value: impl IntoValue<'q>) -> &mut Self {
        if !std::mem::take(&mut self.is_first) {
            self.builder.sql.push_str(self.separator);
        }
        self.builder.push_bind(value);
        self
    }
}
