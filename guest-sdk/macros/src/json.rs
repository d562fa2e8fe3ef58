//! JSON written as Rust tokens: `{"count": 2, "sides": 6}`.
//!
//! Invariant: [`Json::text`] is valid JSON. A comma after the last item is accepted, as in Rust.

use proc_macro2::Span;
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, Ident, Lit, LitStr, Result, Token, braced, bracketed, token};

/// A JSON value. Numbers keep the digits that the author wrote.
pub enum Json {
    Object(Vec<Property>),
    Array(Vec<Json>),
    /// A string, a number, `true`, `false` or `null`, as JSON.
    Other(String),
}

/// A name and a value of an object.
pub struct Property {
    pub name: LitStr,
    pub value: Json,
}

impl Parse for Json {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        if input.peek(token::Brace) {
            let content;
            braced!(content in input);
            let properties = Punctuated::<Property, Token![,]>::parse_terminated(&content)?;
            return Ok(Json::Object(properties.into_iter().collect()));
        }
        if input.peek(token::Bracket) {
            let content;
            bracketed!(content in input);
            let items = Punctuated::<Json, Token![,]>::parse_terminated(&content)?;
            return Ok(Json::Array(items.into_iter().collect()));
        }
        if input.peek(Ident::peek_any) && !input.peek(syn::LitBool) {
            let word = Ident::parse_any(input)?;
            return match word == "null" {
                true => Ok(Json::Other("null".to_owned())),
                false => Err(not_json(word.span())),
            };
        }
        let minus: Option<Token![-]> = input.parse()?;
        let literal: Lit = input.parse().map_err(|error| not_json(error.span()))?;
        let text = match (&literal, minus) {
            (Lit::Str(text), None) => quoted(&text.value()),
            (Lit::Bool(value), None) => value.value.to_string(),
            (Lit::Int(number), _) if number.suffix().is_empty() => number.base10_digits().to_owned(),
            (Lit::Float(number), _)
                if number.suffix().is_empty() && !number.base10_digits().ends_with('.') =>
            {
                number.base10_digits().to_owned()
            }
            _ => return Err(not_json(literal.span())),
        };
        Ok(Json::Other(if minus.is_some() { format!("-{text}") } else { text }))
    }
}

impl Parse for Property {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let name: LitStr = input.parse().map_err(|error| {
            Error::new(error.span(), "the name of a property must be a string: `{\"count\": 2}`")
        })?;
        input.parse::<Token![:]>()?;
        Ok(Property { name, value: input.parse()? })
    }
}

impl Json {
    /// Returns the value as JSON without white space.
    pub fn text(&self) -> String {
        let joined = |parts: Vec<String>| parts.join(",");
        match self {
            Json::Object(properties) => {
                let property = |Property { name, value }: &Property| {
                    format!("{}:{}", quoted(&name.value()), value.text())
                };
                format!("{{{}}}", joined(properties.iter().map(property).collect()))
            }
            Json::Array(items) => format!("[{}]", joined(items.iter().map(Json::text).collect())),
            Json::Other(text) => text.clone(),
        }
    }
}

fn not_json(span: Span) -> Error {
    Error::new(
        span,
        "this is not JSON: write an object, an array, a string, a number, `true`, `false` or `null`",
    )
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            control if control.is_control() => quoted.push_str(&format!("\\u{:04x}", u32::from(control))),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proc_macro2::TokenStream;
    use quote::quote;
    use syn::parse2;

    #[test]
    fn tokens_become_json() {
        let tokens = quote! { {"a": [1, -2.5, true, null,], "b\"": {"c": "x\n\u{1}"}, "d": {}, "e": 1_000} };
        let json: Json = parse2(tokens).expect("JSON");
        assert_eq!(json.text(), r#"{"a":[1,-2.5,true,null],"b\"":{"c":"x\n\u0001"},"d":{},"e":1000}"#);
    }

    #[test]
    fn rejects_tokens_that_are_not_json() {
        for (tokens, expected) in [
            (quote! { Some(1) }, "not JSON"),
            (quote! { 'x' }, "not JSON"),
            (quote! { 1u8 }, "not JSON"),
            (quote! { -"x" }, "not JSON"),
            (quote! { {count: 1} }, "must be a string"),
            (quote! { {"count" = 1} }, "expected `:`"),
            (TokenStream::new(), "not JSON"),
        ] {
            let text = tokens.to_string();
            let message = parse2::<Json>(tokens).err().expect(&text).to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
