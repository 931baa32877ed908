// Attention over pages: code words to partial results, without keys or values in memory.
//
// A lane decodes one token, a warp a tile, a block `warps` tiles of one sequence: a unit.  A warp needs nobody else
// until the outputs of a head are summed over the block.  Work is a pipeline over heads and on over units: step n
// decodes key head n beside value head n - 1, whose weights are known by then.  The tensor cores multiply levels as
// they come out of the tables: queries by key levels, weights (times the token's scale) by value levels.
#pragma once

#include "dquant/attend_feed.cuh"
#include "dquant/attend_slots.cuh"

namespace dquant {

template <class C> struct PageAttention : SlotAttention<C> {
    typedef SlotAttention<C> Tile;
    typedef typename Tile::S S;
    typedef typename Tile::K K;
    typedef typename Tile::V V;
    typedef typename Tile::List List;
    using Tile::p; using Tile::shared; using Tile::base; using Tile::warp; using Tile::lane; using Tile::r;
    using Tile::c; using Tile::key; using Tile::value; using Tile::key_stage; using Tile::value_stage;
    using Tile::key_operand; using Tile::value_operand; using Tile::key_tile; using Tile::value_unit;
    using Tile::last_valid; using Tile::load_key_affine; using Tile::put_slot; using Tile::sum_slots;
    using Tile::load_value_affine; using Tile::unite_value_affine; using Tile::multiply_keys;
    using Tile::multiply_values; using Tile::soften; using Tile::weigh; using Tile::begin_logits;
    using Tile::begin_sums;

    typename FeedOf<K, K::ring_bytes>::Type key_feed;
    typename FeedOf<V, V::ring_bytes>::Type value_feed;
    u32 sum_phase;
    // Of grouped kinds: the first head of the sub-stream, counted in coded order.
    int first_key_head, first_value_head;

    DQ_DEVICE PageAttention(const typename C::Params& p, u8* shared) : Tile(p, shared) {}

    DQ_DEVICE u32 full_barrier() const { return base + S::barrier_at; }
    DQ_DEVICE u32 free_barrier() const { return base + S::barrier_at + 8; }

    // The page and the tile that hold tile `tile` of the unit; beyond the last token, those of the last token.
    DQ_DEVICE const u8* page_of(const Cursor<C>& at, int tile, int& place) const {
        const int last = (p.lengths[at.sequence] - 1) / LANES;
        const int token_tile = least((List::first_unit(p, at.sequence) + at.unit) * C::warps + tile, last);
        place = token_tile % S::page_tiles;
        return p.pages + p.block_table[(i64)at.sequence * p.table_stride + token_tile / S::page_tiles] * p.page_stride;
    }
    DQ_DEVICE const u8* tile_of(const Cursor<C>& at, const u8*& page) const {
        int place;
        page = page_of(at, warp, place);
        return page + S::head_bytes + place * S::tile_bytes;
    }

    DQ_DEVICE const u8* key_words(const u8* tile, const Cursor<C>& at) const {
        return tile + at.group % C::substreams * K::stream_bytes;
    }
    DQ_DEVICE const u8* value_words(const u8* tile, const Cursor<C>& at) const {
        return tile + S::value_words_at + at.group % C::substreams * V::stream_bytes;
    }

    // Brings what later loads of a unit need beside its words nearer: head of the page and affine rows.
    DQ_DEVICE void prefetch(const u8* page, const u8* tile) const {
        if (warp % S::page_tiles == 0)
            for (int i = lane * 128; i < S::head_bytes; i += LANES * 128) prefetch_l2(page + i);
        if (lane < 2) prefetch_l2(tile + (lane ? S::value_affine_at : S::key_affine_at));
    }

    // Queries of a new segment, by the whole block.
    DQ_DEVICE void load_queries(const Cursor<C>& at) const {
        block_barrier();
        Queries<C>::rotate_rows(p, at, shared, warp, lane);
        block_barrier();
        Queries<C>::lay_out(p, at, shared, threadIdx.x);
        block_barrier();
    }
    DQ_DEVICE void mean_logits(const Cursor<C>& at, int parity) const {
        const int before = (List::first_unit(p, at.sequence) + at.unit) * C::warps % S::page_tiles;
        Queries<C>::mean_logits(
            p, at, shared, parity,
            [&](int number) {
                int place;
                return page_of(at, most(number * S::page_tiles - before, 0), place);
            },
            warp, lane
        );
    }

    // Chunk CHUNK's words to the rings, where they mostly are already; whether all lanes find theirs.
    template <bool KEYS, bool VALUES, int CHUNK> DQ_DEVICE bool provide() {
        constexpr int turned_each = C::grouped ? 3 : 1;
        if (CHUNK % turned_each == 0) {
            copy_async_wait();
            warp_barrier();
            if (KEYS) key_feed.turn(key, lane);
            if (VALUES) value_feed.turn(value, lane);
        }
        if (words_are_near<KEYS, VALUES>()) return true;
        copy_async_wait();
        warp_barrier();
        if (KEYS) key_feed.arrived(lane);
        if (VALUES) value_feed.arrived(lane);
        return words_are_near<KEYS, VALUES>();
    }
    template <bool KEYS, bool VALUES> DQ_DEVICE bool words_are_near() const {
        return warp_all((!KEYS || key_feed.near(key)) && (!VALUES || value_feed.near(value)));
    }

    // Key head `key_head` beside value head `value_head`, chunk by chunk.  `between` runs after the first chunk.
    template <bool KEYS, bool VALUES, int CHUNK = 0, class Between>
    DQ_DEVICE void chunks(int key_head, int value_head, Between between) {
        if constexpr (CHUNK < most(KEYS ? K::chunks : 0, VALUES ? V::chunks : 0)) {
            constexpr bool keys = KEYS && CHUNK < K::chunks, values = VALUES && CHUNK < V::chunks;
            bool near = true;
            if constexpr (S::ringed) near = provide<keys, values, CHUNK>();
            warp_barrier();
            if constexpr (C::grouped) {
                TablePlace key_table = {}, value_table = {};
                if constexpr (keys) key_table = p.keys[(first_key_head + key_head) * K::chunks + CHUNK];
                if constexpr (values) value_table = p.values[(first_value_head + value_head) * V::chunks + CHUNK];
                if (near) {
                    decode_groups<C, CHUNK, KEYS, VALUES>(
                        key, key_feed.near_words(), value, value_feed.near_words(), key_table, value_table, key_stage
                    );
                } else if constexpr (S::ringed) {
                    if constexpr (keys)
                        decode_far<K, K::letters(CHUNK)>(
                            PairOfGroup<K, S::key_table_at>(key_table), key, key_feed.far_words(), key_stage
                        );
                    if constexpr (values)
                        decode_far<V, V::letters(CHUNK)>(
                            PairOfGroup<V, S::value_table_at>(value_table), value, value_feed.far_words(), value_stage
                        );
                }
                warp_barrier();
                if constexpr (keys) Tile::template multiply_key_group<CHUNK>();
                if constexpr (values) Tile::template multiply_value_group<CHUNK>();
            } else {
                constexpr int key_letters = KEYS ? K::letters_of(CHUNK) : 0;
                constexpr int value_letters = VALUES ? V::letters_of(CHUNK) : 0;
                if (near) {
                    decode_chunk<C, key_letters, value_letters>(
                        key, key_feed.near_words(), value, value_feed.near_words(), key_stage, value_stage
                    );
                } else if constexpr (S::ringed) {
                    if constexpr (keys)
                        decode_far<K, key_letters>(
                            PairOfLetters<K, C::Key::precision, S::key_table_at>(), key, key_feed.far_words(), key_stage
                        );
                    if constexpr (values)
                        decode_far<V, value_letters>(
                            PairOfLetters<V, C::Value::precision, S::value_table_at>(), value, value_feed.far_words(),
                            value_stage
                        );
                }
                warp_barrier();
                if constexpr (keys) multiply_keys(CHUNK);
                if constexpr (values) multiply_values(CHUNK);
            }
            if constexpr (CHUNK == 0) between();
            chunks<KEYS, VALUES, CHUNK + 1>(key_head, value_head, between);
        }
    }
    // Adds up what all warps put into their slots in the step before.
    DQ_DEVICE void sum_head(int step, int slot, int head, bool first, int parity) {
        barrier_wait(full_barrier(), sum_phase);
        sum_phase ^= 1;
        sum_slots(step, slot, head, first, parity);
        warp_arrives(free_barrier(), lane);
    }

    // What queries are turned by: it comes from no kernel before.
    DQ_DEVICE void touch_factors() const {
        constexpr int bytes = K::rotated ? C::heads * S::dim * 4 : 0;
        for (int i = threadIdx.x * 32; i < bytes; i += S::threads * 32) touch(unused(0), (const u8*)p.factors + i);
    }
    // Four bytes of a thread, one of two: in the slots, which are free until tables are there.
    DQ_DEVICE u32 unused(int which) const { return base + S::slot_at + (which * S::threads + threadIdx.x) * 4; }
    static_assert(2 * S::threads * 4 <= C::warps * S::slot_bytes, "slots have room for them");

    DQ_DEVICE void run() {
        for (int i = threadIdx.x * 16; i < K::table_bytes; i += S::threads * 16)
            copy_async16(base + S::key_table_at + i, (const u8*)p.key_table + i);
        for (int i = threadIdx.x * 16; i < V::table_bytes; i += S::threads * 16)
            copy_async16(base + S::value_table_at + i, (const u8*)p.value_table + i);
        if (threadIdx.x == 0) {
            barrier_init(full_barrier(), C::warps * warp_arrivals);
            barrier_init(free_barrier(), C::warps * warp_arrivals);
            for (int i = 0; i < 4 * C::warps; ++i) barrier_init(base + S::barrier_at + 16 + 8 * i, 1);
            barriers_ready();
        }
        touch_factors();
        block_barrier();  // barriers
        wait_for_grid_before();
        const int items = List::total_units(p, lane) * S::groups, blocks = least(p.blocks, items);
        if ((int)blockIdx.x >= blocks) {
            copy_async_wait();
            return;
        }
        const int begin = List::run_begin(blockIdx.x, blocks, items);
        const int end = List::run_begin(blockIdx.x + 1, blocks, items);
        Cursor<C> at;
        at.seek(p, begin, lane);
        Queries<C>::touch_rows(p, at, unused(1), warp, lane);

        const u32 streams = base + S::streams_at + warp * S::warp_stream_bytes;
        key_feed.init(streams, base + S::barrier_at + 16 + warp * 32, (RingState*)(shared + S::ring_at) + 2 * warp);
        value_feed.init(
            streams + S::key_stream_bytes, base + S::barrier_at + 32 + warp * 32,
            (RingState*)(shared + S::ring_at) + 2 * warp + 1
        );
        const u32 stage = base + S::stage_at + warp * S::stage_bytes;
        if (C::grouped) {
            key_stage = key_operand = stage + lane * 16;
            value_stage = value_operand = key_stage + LANES * 16;
        } else {
            key_stage = stage + lane * 32 + (lane >> 2 & 1) * 16;
            value_stage = key_stage + LANES * 32;
            key_operand = stage + (lane & 15) * 32 + (lane >> 4 ^ (lane >> 2 & 1)) * 16;
            value_operand =
                stage + LANES * 32 + ((lane >> 4) * 8 + (lane & 7)) * 32 + ((lane >> 3 ^ lane >> 2) & 1) * 16;
        }
        sum_phase = 0;

        const u8* page;
        key_tile = tile_of(at, page);
        prefetch(page, key_tile);
        // All blocks begin at once, and queries would wait behind all their words: first what the first head may need.
        constexpr int head_bytes = least(K::most_rows(1) * K::row_bytes, K::stream_bytes);
        key_feed.fetch_first(key_words(key_tile, at), head_bytes, lane);
        load_queries(at);
        key_feed.fetch_rest(key_words(key_tile, at), lane);
        value_feed.fetch_first(value_words(key_tile, at), V::stream_bytes, lane);
        load_key_affine(at, page);
        load_value_affine(key_tile, page);
        copy_async_wait();
        block_barrier();  // tables

        const int steps = (end - begin) * S::heads;
        int slot = blockIdx.x + at.sequence * S::groups + at.group;
        int key_head = 0, parity = 0;
        bool first = true;        // the unit of the keys is the first of its segment
        bool next_first = false;  // the next unit is the first of its segment
        const u8* words = nullptr;  // of the values that follow
        // Of the values whose outputs stand in the slots.
        int held_slot = 0, held_head = 0, held_parity = 0;
        bool held_first = true;

        key_feed.template start<1>(key, lane, last_valid);
        begin_logits(0);
        first_key_head = first_value_head = at.group % C::substreams * S::heads;
        chunks<true, false>(0, 0, [&] { mean_logits(at, 0); });
        key_feed.wait_rest();
        unite_value_affine();
        if (C::Key::mean) block_barrier();  // mean logits
        soften(0, 0);
        weigh();
        value_feed.template start<1>(value, lane, last_valid);
        if (!S::early && steps > 1) {
            next_first = at.advance(p);
            key_tile = tile_of(at, page);
            key_feed.fetch_first(key_words(key_tile, at), K::stream_bytes, lane);
        }

#pragma unroll 1
        for (int n = 1; n < steps; ++n) {
            const int value_head = key_head, value_slot = slot, value_parity = parity;
            first_value_head = first_key_head;
            const bool value_first = first;
            const bool new_unit = key_head == S::heads - 1;
            key_head = new_unit ? 0 : key_head + 1;
            if (new_unit) {
                parity ^= 1;
                first = next_first;
                slot = blockIdx.x + at.sequence * S::groups + at.group;
                first_key_head = at.group % C::substreams * S::heads;
                if (S::early) key_feed.fetch_rest(key_words(key_tile, at), lane);
                load_key_affine(at, page);
                // Their predecessors are part of the weights already.
                load_value_affine(key_tile, page);
                words = value_words(key_tile, at);
                value_feed.fetch_first(words, value_feed.free_bytes(value, lane), lane);
                // The weights of the last head are in registers already: nothing needs the old queries.
                if (first) load_queries(at);
                if (first || !S::early) {
                    mean_logits(at, parity);
                    block_barrier();
                }
                key_feed.template start<K::chunk_rows>(key, lane, last_valid);
            }
            // The last head of a unit: the next one's first words.
            const bool last_head = key_head == S::heads - 1 && n + 1 < steps;
            if (S::early && last_head) {
                next_first = at.advance(p);
                key_tile = tile_of(at, page);
                prefetch(page, key_tile);
                key_feed.fetch_first(key_words(key_tile, at), key_feed.free_bytes(key, lane), lane);
            }
            begin_logits(key_head);
            begin_sums(first_value_head + value_head);
            chunks<true, true>(key_head, value_head, [&] {
                if (n > 1) sum_head(n, held_slot, held_head, held_first, held_parity);
                // Behind the barrier of the sum: all warps are done with the buffer of two units ago.
                if (S::early && last_head && !next_first) mean_logits(at, parity ^ 1);
                key_feed.wait_rest();
                value_feed.wait_rest();
            });
            if (new_unit) value_feed.fetch_rest(words, lane);
            if (!S::early && last_head) {
                next_first = at.advance(p);
                key_tile = tile_of(at, page);
                key_feed.fetch_first(key_words(key_tile, at), K::stream_bytes, lane);
            }
            if (n > 1) barrier_wait(free_barrier(), sum_phase ^ 1);
            put_slot(value_unit);
            warp_arrives(full_barrier(), lane);
            held_slot = value_slot, held_head = value_head, held_first = value_first, held_parity = value_parity;
            soften(key_head, parity);
            if (new_unit) unite_value_affine();
            weigh();
            if (new_unit) value_feed.template start<V::chunk_rows>(value, lane, last_valid);
        }
        let_next_grid_start();
        first_value_head = first_key_head;
        begin_sums(first_value_head + key_head);
        chunks<false, true>(0, key_head, [&] {
            if (steps > 1) sum_head(steps, held_slot, held_head, held_first, held_parity);
            value_feed.wait_rest();
        });
        if (steps > 1) barrier_wait(free_barrier(), sum_phase ^ 1);
        put_slot(value_unit);
        warp_arrives(full_barrier(), lane);
        barrier_wait(full_barrier(), sum_phase);
        sum_slots(steps + 1, slot, key_head, first, parity);
    }
};

template <class C> DQ_DEVICE void attend_pages(const typename C::Params& p) {
    DQ_SHARED(shared);
    if (shared_address(shared) != shared_start(shared)) stop();
    PageAttention<C>(p, shared).run();
}

}  // namespace dquant
