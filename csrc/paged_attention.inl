// Paged attention over any mix of rows.
//
// Work is cut into items: one sequence, one kv head, up to kItemVectors of the query vectors that read it (a query
// vector is one row of one query head). An item runs span by span; within a span every tile of its vectors reuses the
// keys and values just read. Items go to workers in contiguous shares of equal cost. Where one item is a large part
// of all the work, its spans are divided among workers: they leave each span's (acc, m, l) in the scratch memory and
// merge_attention joins them. Either way a span is computed alone and spans are joined in ascending order by the same
// operations, so that the division never shows in the result.

constexpr int kItemVectors = 8 * kTileVectors;
constexpr int kSpanOverhead = 32;  // cost of starting a tile on a span, in tokens
constexpr int kAheadChunks = 12;     // how far ahead of the computation memory is asked for
constexpr int kSmallItem = 8;      // an item below 1/kSmallItem of a worker's share is never divided

// The result of a span or of several: acc [D padded to 16], m, l. `kRecordTail` floats hold m and l.
constexpr int kRecordTail = 16;
OCTAVO_INLINE int padded_head(int head_size) { return (head_size + 15) / 16 * 16; }
OCTAVO_INLINE int record_floats(int head_size) { return padded_head(head_size) + kRecordTail; }

OCTAVO_INLINE int64_t worker_floats(int head_size) {
  return int64_t{kItemVectors} * padded_head(head_size)   // queries
         + int64_t{kItemVectors} * record_floats(head_size)   // joined results
         + int64_t{kTileVectors} * record_floats(head_size)   // one span's results
         + int64_t{kTileVectors} * kScoreStride;
}

static int64_t attention_scratch_bytes(int workers, int head_size, int64_t max_len) {
  const int64_t spans = (max_len + kSpan - 1) / kSpan;
  const int64_t divided = (workers - 1) * spans * kItemVectors * record_floats(head_size);
  return 4 * (workers * worker_floats(head_size) + divided);
}

// Query vectors [begin, end) of one sequence and kv head: vector v is row v / G, query head v % G of the group.
struct Item {
  int seq, kv_head, begin, end;
  int first_token, last_token;  // the union of what its vectors see is [first_token, last_token]
  int64_t cost;

  int first_span() const { return first_token / kSpan; }
  int end_span() const { return last_token / kSpan + 1; }
  int num_tiles() const { return (end - begin + kTileVectors - 1) / kTileVectors; }
  int64_t span_cost(int span) const {
    const int begin_token = span * kSpan > first_token ? span * kSpan : first_token;
    const int end_token = (span + 1) * kSpan - 1 < last_token ? (span + 1) * kSpan : last_token + 1;
    return int64_t{num_tiles()} * (end_token - begin_token + kSpanOverhead);
  }
};

OCTAVO_INLINE int first_visible(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// Calls body(item) for the items of a sequence and one kv head.
template <class Body>
OCTAVO_INLINE void each_chunk(const Batch& b, const Attention& a, int group_size, int seq, int kv_head, const Body& body) {
  const int row = b.query_starts[seq];
  const int vectors = (b.query_starts[seq + 1] - row) * group_size;
  for (int begin = 0; begin < vectors; begin += kItemVectors) {
    const int end = begin + kItemVectors < vectors ? begin + kItemVectors : vectors;
    Item item{seq, kv_head, begin, end, 0, b.positions[row + (end - 1) / group_size], 0};
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
        int64_t begin = seq_begin;
        for (int h = 0; h < kv_heads_; ++h) {
          each_chunk(b_, a_, group_size_, s, h, [&](const Item& item) {
            const Part part = part_of(item, begin);
            any_divided |= part.is_divided;
            if (part.begin_span < part.end_span) body(part);
            begin += item.cost;
          });
        }
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
        int64_t begin = seq_begin;
        for (int h = 0; h < kv_heads_; ++h) {
          each_chunk(b_, a_, group_size_, s, h, [&](const Item& item) {
            const Part part = part_of(item, begin);
            if (part.is_divided) body(item, part.first_owner);
            begin += item.cost;
          });
        }
      }
      seq_begin = seq_end;
    }
  }

 private:
  int64_t seq_cost(int seq) const {
    int64_t cost = 0;
    each_chunk(b_, a_, group_size_, seq, 0, [&](const Item& item) { cost += item.cost; });
    return cost * kv_heads_;
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

// Joins the result `from` of the next span into `into`.
OCTAVO_INLINE void join(float* into, const float* from, int head_size) {
  const int width = padded_head(head_size);
  const float m0 = into[width], m1 = from[width];
  const float m = m0 > m1 ? m0 : m1;
  const f32x16 a = exp(broadcast(m0 - m)), b = exp(broadcast(m1 - m));
  for (int i = 0; i < width; i += 16) store(into + i, fma(load(from + i), b, load(into + i) * a));
  float factors[16];
  store(factors, fma(broadcast(from[width + 1]), b, broadcast(into[width + 1]) * a));
  into[width] = m;
  into[width + 1] = factors[0];
}

OCTAVO_INLINE void copy_record(float* to, const float* from, int head_size) {
  for (int i = 0; i < record_floats(head_size); i += 16) store(to + i, load(from + i));
}

// One call of paged_attention or merge_attention, as one worker sees it.
template <class T>
class AttentionRun {
 public:
  AttentionRun(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out, void* scratch,
               Worker w)
      : q_(q), kv_(kv), b_(b), a_(a), out_(out), group_size_(a.num_heads / kv.num_kv_heads),
        width_(padded_head(kv.head_size)), record_(record_floats(kv.head_size)) {
    float* mine = static_cast<float*>(scratch) + w.id * worker_floats(kv.head_size);
    queries_ = mine;
    joined_ = queries_ + int64_t{kItemVectors} * width_;
    result_ = joined_ + int64_t{kItemVectors} * record_;
    scores_ = result_ + int64_t{kTileVectors} * record_;
    divided_ = static_cast<float*>(scratch) + w.count * worker_floats(kv.head_size);
    spans_ = (b.max_blocks * kv.block_size + kSpan - 1) / kSpan;
  }

  // Computes one part. `next` is the part that follows, or null: its first keys are asked for near the end.
  void run(const Part& part, const Part* next) {
    const Item& item = part.item;
    load_queries(item);
    list_span(item, part.begin_span, &spans_listed_[0]);
    for (int span = part.begin_span; span < part.end_span; ++span) {
      SpanList& current = spans_listed_[(span - part.begin_span) % 2];
      SpanList& following = spans_listed_[(span - part.begin_span + 1) % 2];
      following.count = 0;
      if (span + 1 < part.end_span) {
        list_span(item, span + 1, &following);
      } else if (next) {
        list_span(next->item, next->begin_span, &following);
      }
      list_targets(current, following);
      run_span(item, current, [&](int vector, const float* result) {
        float* joined = part.is_divided ? divided_record(item, part.first_owner, span, vector)
                                        : joined_ + int64_t{vector - item.begin} * record_;
        if (part.is_divided || span == first_span(item, vector)) {
          copy_record(joined, result, kv_.head_size);
        } else {
          join(joined, result, kv_.head_size);
        }
      });
    }
    if (part.is_divided) return;
    for (int v = item.begin; v < item.end; ++v) finish(item, v, joined_ + int64_t{v - item.begin} * record_);
  }

  // Joins the spans of one vector of a divided item.
  void merge(const Item& item, int first_owner, int vector) {
    const int first = first_span(item, vector), last = position(item, vector) / kSpan;
    copy_record(joined_, divided_record(item, first_owner, first, vector), kv_.head_size);
    for (int span = first + 1; span <= last; ++span) {
      join(joined_, divided_record(item, first_owner, span, vector), kv_.head_size);
    }
    finish(item, vector, joined_);
  }

 private:
  int64_t row(const Item& item, int vector) const { return b_.query_starts[item.seq] + vector / group_size_; }
  int position(const Item& item, int vector) const { return b_.positions[row(item, vector)]; }
  int first_span(const Item& item, int vector) const {
    return first_visible(position(item, vector), a_.window) / kSpan;
  }
  int64_t head_column(const Item& item, int vector) const {
    return int64_t{item.kv_head * group_size_ + vector % group_size_} * kv_.head_size;
  }
  float* divided_record(const Item& item, int first_owner, int span, int vector) const {
    return divided_ + ((first_owner * spans_ + span) * kItemVectors + (vector - item.begin)) * record_;
  }

  // The item's queries side by side: in their own rows they lie far apart, often in the same set of the cache.
  void load_queries(const Item& item) {
    for (int v = item.begin; v < item.end; ++v) {
      const float* from = q_.data + row(item, v) * q_.ld + head_column(item, v);
      float* to = queries_ + int64_t{v - item.begin} * width_;
      for (int d = 0; d < kv_.head_size; d += 16) {
        const int lanes = kv_.head_size - d < 16 ? kv_.head_size - d : 16;
        store(to + d, load_lanes(from + d, lanes));
      }
    }
  }

  // What an item sees of one span.
  struct SpanList {
    int origin;  // position of the span's first token
    int count;
    Chunk<T> chunks[kSpan];
  };

  void list_span(const Item& item, int span, SpanList* list) const {
    const int64_t head_bytes = int64_t{2} * kv_.block_size * kv_.head_size * static_cast<int>(sizeof(T));
    const HeadBlocks<T> blocks{b_.block_table + b_.table_rows[item.seq] * b_.max_blocks,
                               static_cast<const char*>(kv_.data) + item.kv_head * head_bytes, kv_.block_bytes,
                               kv_.block_size, kv_.head_size};
    const int origin = span * kSpan;
    const int begin = item.first_token > origin ? (item.first_token - origin) / 16 * 16 : 0;
    const int end = item.last_token + 1 - origin < kSpan ? item.last_token + 1 - origin : kSpan;
    list->origin = origin;
    list->count = list_chunks(blocks, origin, begin, end, list->chunks);
  }

  // What is read kAheadChunks after each of the span's keys, then each of its values: keys, values, the keys of
  // the next span, and at the very end anything that is there.
  void list_targets(const SpanList& current, const SpanList& following) {
    const int n = current.count;
    for (int i = 0; i < 2 * n; ++i) {
      const int j = i + kAheadChunks;
      if (j < n) {
        targets_[i] = {current.chunks[j].keys, kv_.block_size};
      } else if (j < 2 * n || following.count == 0) {
        targets_[i] = {current.chunks[(j < 2 * n ? j : i) % n].values, 16};
      } else {
        const int k = j - 2 * n < following.count ? j - 2 * n : following.count - 1;
        targets_[i] = {following.chunks[k].keys, kv_.block_size};
      }
    }
  }

  // Computes every tile on one span and calls take(vector, result) for each vector that sees some of it.
  template <class Take>
  OCTAVO_INLINE void run_span(const Item& item, const SpanList& list, const Take& take) {
    for (int v = item.begin; v < item.end; v += kTileVectors) {
      const int count = item.end - v < kTileVectors ? item.end - v : kTileVectors;
      with_constant<kTileVectors>(count, [&](auto m) {
        if (v == item.begin) {
          run_tile<m.value, true>(item, v, list);
        } else {
          run_tile<m.value, false>(item, v, list);
        }
      });
      for (int m = 0; m < count; ++m) {
        if (visible_[m].begin < visible_[m].end) take(v + m, result_ + m * record_);
      }
    }
  }

  // Sets visible_ for a tile. Returns the tokens that some vector sees, and those that all see.
  template <int M>
  OCTAVO_INLINE void find_visible(const Item& item, int vector, int origin, Span* some, Span* all) {
    *some = {kSpan, 0};
    *all = {0, kSpan};
    for (int m = 0; m < M; ++m) {
      const int last = position(item, vector + m);
      const int first = first_visible(last, a_.window);
      Span& seen = visible_[m];
      seen = {first > origin ? first - origin : 0, last + 1 - origin < kSpan ? last + 1 - origin : kSpan};
      if (seen.begin >= seen.end) seen = {0, 0};
      if (seen.end > 0 && seen.begin < some->begin) some->begin = seen.begin;
      if (seen.end > some->end) some->end = seen.end;
      if (seen.begin > all->begin) all->begin = seen.begin;
      if (seen.end < all->end) all->end = seen.end;
    }
    if (all->begin >= all->end) *all = {kSpan, kSpan};
  }

  template <int M, bool kAhead>
  __attribute__((noinline)) void run_tile(const Item& item, int vector, const SpanList& list) {
    Span some, all;
    find_visible<M>(item, vector, list.origin, &some, &all);
    if (some.end == 0) return;
    score<M, kAhead>(queries_ + int64_t{vector - item.begin} * width_, list, some);
    for (int m = 0; m < M; ++m) {
      float* record = result_ + m * record_;
      for (int i = 0; i < width_; i += 16) store(record + i, zero());
      softmax_span(scores_ + m * kScoreStride, visible_[m].begin, visible_[m].end, a_.scale, a_.softcap, record + width_,
                   record + width_ + 1);
    }
    // Tokens before and after those that all see are mixed for each vector alone, in order.
    for (int m = 0; m < M; ++m) {
      mix_one(m, list, {visible_[m].begin, all.begin < visible_[m].end ? all.begin : visible_[m].end});
    }
    mix_all_columns<M, kAhead>(scores_, list.chunks, list.count, all, kv_.head_size, targets_ + list.count, result_,
                               record_);
    for (int m = 0; m < M; ++m) mix_one(m, list, {all.end, visible_[m].end});
  }

  void mix_one(int m, const SpanList& list, Span tokens) {
    mix_all_columns<1, false>(scores_ + m * kScoreStride, list.chunks, list.count, tokens, kv_.head_size, targets_,
                              result_ + m * record_, record_);
  }

  template <int M, bool kAhead>
  OCTAVO_INLINE void score(const float* queries, const SpanList& list, Span some) {
    int c = 0, count = list.count;
    while (c < count && list.chunks[c].end <= some.begin) ++c;
    while (count > c && list.chunks[count - 1].begin >= some.end) --count;
    for (; c + kTileChunks <= count; c += kTileChunks) {
      score_chunks<M, kTileChunks, kAhead>(queries, width_, kv_.head_size, list.chunks + c, kv_.block_size, targets_ + c,
                                           scores_);
    }
    for (; c < count; ++c) {
      score_chunks<M, 1, kAhead>(queries, width_, kv_.head_size, list.chunks + c, kv_.block_size, targets_ + c, scores_);
    }
  }

  void finish(const Item& item, int vector, const float* record) {
    float* to = out_.data + row(item, vector) * out_.ld + head_column(item, vector);
    const f32x16 sum = broadcast(record[width_ + 1]);
    for (int d = 0; d < kv_.head_size; d += 16) {
      store_lanes(to + d, kv_.head_size - d < 16 ? kv_.head_size - d : 16, load(record + d) / sum);
    }
  }

  const View& q_;
  const KVStore& kv_;
  const Batch& b_;
  const Attention& a_;
  const View& out_;
  const int group_size_;
  const int width_, record_;  // floats
  float* queries_;
  float* joined_;   // [kItemVectors] records
  float* result_;   // [kTileVectors] records
  float* scores_;   // [kTileVectors][kScoreStride]
  float* divided_;  // [first owner][span][vector] records of divided items
  int64_t spans_;
  Span visible_[kTileVectors];
  SpanList spans_listed_[2];
  Target<T> targets_[2 * kSpan];
};

template <class T>
static bool attend(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out, void* scratch,
                   Worker w) {
  AttentionRun<T> run(q, kv, b, a, out, scratch, w);
  Part held;
  bool is_holding = false;
  const bool any_divided = Division(b, a, kv.num_kv_heads, w).each_part([&](const Part& part) {
    if (is_holding) run.run(held, &part);
    held = part;
    is_holding = true;
  });
  if (is_holding) run.run(held, nullptr);
  return any_divided;
}

static bool paged_attention(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out,
                            void* scratch, Worker w) {
  return kv.type == KVType::f16 ? attend<uint16_t>(q, kv, b, a, out, scratch, w)
                                : attend<float>(q, kv, b, a, out, scratch, w);
}

static void merge_attention(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out,
                            void* scratch, Worker w) {
  AttentionRun<float> run(q, kv, b, a, out, scratch, w);  // results are float whatever is stored
  int next = 0;
  Division(b, a, kv.num_kv_heads, w).each_divided([&](const Item& item, int first_owner) {
    for (int v = item.begin; v < item.end; ++v) {
      if (next++ % w.count == w.id) run.merge(item, first_owner, v);
    }
  });
}
