// How the work of paged attention is cut into items and divided among workers.
//
// An item is one sequence, one kv head or all, and up to kItemVectors of the query vectors that read them (a query vector
// is one row of one query head). Items go to workers in contiguous shares of equal cost. Where one item is a large part of
// all the work, its spans are divided. Each worker computes the division for itself; it never shows in a result.

constexpr int kItemVectors = 8 * kTileVectors;
constexpr int kSpanOverhead = 32;  // cost of starting a tile on a span, in tokens
constexpr int kSmallItem = 8;      // an item below 1/kSmallItem of a worker's share is never divided

// Query vectors [begin, end) of one sequence and each of a few kv heads: vector v of a head is row v / G, query head
// v % G of the group.
struct Item {
  int seq, kv_head, num_heads, begin, end;
  int first_token, last_token;  // the union of what its vectors see is [first_token, last_token]
  int64_t cost;

  int num_per_head() const { return end - begin; }
  int num_vectors() const { return num_heads * num_per_head(); }
  int first_span() const { return first_token / kSpan; }
  int end_span() const { return last_token / kSpan + 1; }
  int num_tiles() const { return num_heads * ((end - begin + kTileVectors - 1) / kTileVectors); }
  int64_t span_cost(int span) const {
    const int begin_token = span * kSpan > first_token ? span * kSpan : first_token;
    const int end_token = (span + 1) * kSpan - 1 < last_token ? (span + 1) * kSpan : last_token + 1;
    return int64_t{num_tiles()} * (end_token - begin_token + kSpanOverhead);
  }
};

// Calls body(item) for the items of a sequence and `num_heads` kv heads from `kv_head` on.
template <class Body>
OCTAVO_INLINE void each_item(const Batch& b, const Attention& a, int group_size, int seq, int kv_head, int num_heads,
                             const Body& body) {
  const int row = b.query_starts[seq], most = kItemVectors / num_heads;
  const int vectors = (b.query_starts[seq + 1] - row) * group_size;
  for (int begin = 0; begin < vectors; begin += most) {
    const int end = begin + most < vectors ? begin + most : vectors;
    Item item{seq, kv_head, num_heads, begin, end, 0, b.positions[row + (end - 1) / group_size], 0};
    item.first_token = first_visible(b.positions[row + begin / group_size], a.window);
    const int tokens = item.last_token + 1 - item.first_token;
    item.cost = int64_t{item.num_tiles()} * (tokens + (item.end_span() - item.first_span()) * kSpanOverhead);
    body(item);
  }
}

// Part [begin_span, end_span) of an item, for one worker.
struct Part {
  Item item;
  int begin_span, end_span;
  int first_owner;  // the worker that has the item's first span
  bool is_divided;
};

// Divides the step's attention. Deterministic, computed by each worker for itself.
class Division {
 public:
  Division(const Batch& b, const Attention& a, int kv_heads, Worker w)
      : b_(b), a_(a), group_size_(a.num_heads / kv_heads), kv_heads_(kv_heads), w_(w) {
    for (int s = 0; s < b.num_seqs; ++s) total_ += seq_cost(s);
  }

  // Calls body(part) for each of this worker's parts, in order; true if some item is divided.
  template <class Body>
  OCTAVO_INLINE bool each_part(const Body& body) const {
    bool any_divided = false;
    int64_t seq_begin = 0;
    for (int s = 0; s < b_.num_seqs; ++s) {
      const int64_t seq_end = seq_begin + seq_cost(s);
      const int first = owner(seq_begin), last = seq_end > seq_begin ? owner(seq_end - 1) : first;
      const bool is_mine = seq_end > seq_begin && first <= w_.id && w_.id <= last;
      if (is_mine || first != last) {
        each_part_of(s, seq_begin, seq_end, [&](const Part& part) {
          any_divided |= part.is_divided;
          if (part.begin_span < part.end_span) body(part);
        });
      }
      seq_begin = seq_end;
    }
    return any_divided;
  }

  // Calls body(item, first_owner) for each divided item.
  template <class Body>
  OCTAVO_INLINE void each_divided(const Body& body) const {
    int64_t seq_begin = 0;
    for (int s = 0; s < b_.num_seqs; ++s) {
      const int64_t seq_end = seq_begin + seq_cost(s);
      if (seq_end > seq_begin && owner(seq_begin) != owner(seq_end - 1)) {
        each_part_of(s, seq_begin, seq_end, [&](const Part& part) {
          if (part.is_divided) body(part.item, part.first_owner);
        });
      }
      seq_begin = seq_end;
    }
  }

 private:
  // Calls body(part) for this worker's part, empty or not, of each item of a sequence whose cost is [seq_begin, seq_end).
  template <class Body>
  OCTAVO_INLINE void each_part_of(int seq, int64_t seq_begin, int64_t seq_end, const Body& body) const {
    const int num_heads = heads_of_item(seq, seq_end - seq_begin);
    int64_t begin = seq_begin;
    for (int h = 0; h < kv_heads_; h += num_heads) {
      each_item(b_, a_, group_size_, seq, h, num_heads, [&](const Item& item) {
        body(part_of(item, begin));
        begin += item.cost;
      });
    }
  }

  int64_t seq_cost(int seq) const {
    int64_t cost = 0;
    each_item(b_, a_, group_size_, seq, 0, 1, [&](const Item& item) { cost += item.cost; });
    return cost * kv_heads_;
  }

  // All kv heads at once where there are few vectors, as in decoding: they lie side by side in each block, and what the
  // processor fetches unasked beyond one is the next. But not where that leaves too few items to share out.
  int heads_of_item(int seq, int64_t cost) const {
    const int vectors = (b_.query_starts[seq + 1] - b_.query_starts[seq]) * group_size_;
    return vectors * kv_heads_ <= kItemVectors && 2 * cost * w_.count <= total_ ? kv_heads_ : 1;
  }

  int owner(int64_t cost) const { return static_cast<int>(cost * w_.count / total_); }

  // This worker's spans of an item whose cost starts at `begin`: those whose middle lies in its share.
  Part part_of(const Item& item, int64_t begin) const {
    const int first = item.first_span(), end = item.end_span();
    if (item.cost * w_.count * kSmallItem <= total_ || end - first == 1) {
      const bool is_mine = owner(begin + item.cost / 2) == w_.id;
      return {item, first, is_mine ? end : first, 0, false};
    }
    Part part{item, first, first, 0, false};
    int first_owner = 0, last_owner = 0;
    for (int span = first; span < end; ++span) {
      const int64_t cost = item.span_cost(span);
      last_owner = owner(begin + cost / 2);
      begin += cost;
      if (span == first) first_owner = last_owner;
      if (last_owner < w_.id) part.begin_span = part.end_span = span + 1;
      if (last_owner == w_.id) part.end_span = span + 1;
    }
    part.first_owner = first_owner;
    part.is_divided = first_owner != last_owner;
    return part;
  }

  const Batch& b_;
  const Attention& a_;
  int group_size_, kv_heads_;
  Worker w_;
  int64_t total_ = 0;
};
