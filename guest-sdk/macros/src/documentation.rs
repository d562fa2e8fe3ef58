//! Conversion of doc comments to text.

use syn::{Attribute, Expr, Lit, Meta};

/// Returns the doc comment of an item as one text: lines of a paragraph are joined, paragraphs are kept.
/// Returns an empty text if there is none.
pub fn text(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for line in attributes.iter().filter_map(line) {
        for line in line.split('\n').map(str::trim) {
            match line {
                "" if text.is_empty() => {}
                "" if text.ends_with('\n') => {}
                "" => text.push_str("\n\n"),
                line => {
                    if !text.is_empty() && !text.ends_with('\n') {
                        text.push(' ');
                    }
                    text.push_str(line);
                }
            }
        }
    }
    text.trim().to_owned()
}

fn line(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(meta) = &attribute.meta else { return None };
    if !meta.path.is_ident("doc") {
        return None;
    }
    match &meta.value {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse_quote;

    #[test]
    fn lines_join_and_paragraphs_stay() {
        let item: syn::ItemFn = parse_quote! {
            /// Books a room
            /// for some nights.
            ///
            /// Not for tables.
            #[inline]
            fn book() {}
        };
        assert_eq!(text(&item.attrs), "Books a room for some nights.\n\nNot for tables.");
    }
}
